//! The socket at which an endpoint's programs connect, and what else the endpoint waits for.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;

/// Maximum number of events that are taken at once. The next look finds those beyond.
const EVENTS: usize = 24;

/// Marks of the events of the listening socket, of other descriptors, and of bell 0; those of the other bells follow.
const SOCKET: u64 = 0;
const OTHER: u64 = 1;
const BELL: u64 = 2;

/// What may be ready.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ready {
    /// The listening socket: a connection can be accepted.
    pub socket: bool,
    /// One of the other descriptors that are no bells.
    pub others: bool,
}

/// A listening socket in a set of watched descriptors.
#[derive(Debug)]
pub(super) struct Listener {
    socket: OwnedFd,
    epoll: OwnedFd,
    /// The socket is not watched, because no descriptor was left for a connection.
    is_deaf: bool,
    /// Another worker accepts connections.
    is_others: bool,
}

impl Listener {
    /// Watches `socket`, which listens.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK)?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let listener = Listener { socket, epoll, is_deaf: false, is_others: false };
        listener.watch_socket()?;
        Ok(listener)
    }

    /// Leaves the socket to another worker, which accepts connections.
    pub fn leave_socket(&mut self) {
        self.unwatch(self.socket.as_fd());
        self.is_others = true;
    }

    /// Returns the socket.
    pub fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Accepts a connection, if there is one and a descriptor for it.
    pub fn accept(&mut self) -> Option<OwnedFd> {
        match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(connection) => Some(connection),
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                // The connection waits for the next tick: waking for it until there is a descriptor would spin.
                self.is_deaf |= epoll::delete(&self.epoll, &self.socket).is_ok();
                None
            }
            Err(_) => None,
        }
    }

    /// Watches the socket again, if it was not. Call it a few times a second.
    pub fn tick(&mut self) {
        self.is_deaf = self.is_deaf && self.watch_socket().is_err();
    }

    /// Watches another descriptor.
    ///
    /// # Errors
    /// No memory is left.
    pub fn watch(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        self.add(descriptor, OTHER, epoll::EventFlags::IN)
    }

    fn watch_socket(&self) -> io::Result<()> {
        if self.is_others {
            return Ok(());
        }
        self.add(self.socket.as_fd(), SOCKET, epoll::EventFlags::IN)
    }

    fn add(&self, descriptor: BorrowedFd<'_>, mark: u64, flags: epoll::EventFlags) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, epoll::EventData::new_u64(mark), flags)?)
    }

    /// Watches a descriptor no more.
    pub fn unwatch(&self, descriptor: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, descriptor);
    }

    /// Watches the socket, `others` and `bells`, each with its number, and nothing else: not even a file whose descriptor was closed here while
    /// another process has it open.
    ///
    /// # Errors
    /// No descriptor is left for a new set, and the earlier one stays; or not all are watched, for lack of memory.
    pub fn watch_only<'a>(
        &mut self,
        others: impl Iterator<Item = BorrowedFd<'a>>,
        mut bells: impl Iterator<Item = (u32, BorrowedFd<'a>)>,
    ) -> io::Result<()> {
        self.epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        self.is_deaf = self.watch_socket().is_err();
        others.for_each(|descriptor| _ = self.watch(descriptor));
        bells.try_for_each(|(number, bell)| self.watch_bell(number, bell))
    }

    /// Watches another bell, with its number.
    ///
    /// # Errors
    /// No memory is left.
    pub fn watch_bell(&self, number: u32, bell: BorrowedFd<'_>) -> io::Result<()> {
        // Edge-triggered: nobody has to read a bell.
        self.add(bell, BELL + u64::from(number), epoll::EventFlags::IN | epoll::EventFlags::ET)
    }

    /// Takes note of the bells that have rung, and tells their numbers. Returns what else may be ready, or nothing if none of
    /// that is known.
    pub fn hear(&self, mut rung: impl FnMut(usize)) -> Option<Ready> {
        let nothing = epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [nothing; EVENTS];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let heard = epoll::wait(&self.epoll, &mut events, Some(&at_once));
        let count = heard.ok()?;
        let mut ready = Ready::default();
        for event in &events[..count] {
            match { event.data }.u64() {
                SOCKET => ready.socket = true,
                OTHER => ready.others = true,
                bell => rung(usize::try_from(bell - BELL).expect("it was given")),
            }
        }
        Some(ready)
    }

    /// Returns the descriptor that is readable while a watched one is.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec};
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use tasuki_testing::alone;

    fn socket() -> OwnedFd {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
    }

    fn is_readable(listener: &Listener) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut [PollFd::new(&listener.fd(), PollFlags::IN)], Some(&at_once)).unwrap() == 1
    }

    #[test]
    fn a_connection_without_a_descriptor_waits_for_the_tick_and_wakes_nobody() {
        if !alone(a_connection_without_a_descriptor_waits_for_the_tick_and_wakes_nobody) {
            return;
        }
        let (server, client) = (socket(), socket());
        let name = format!("tasuki-listener-{}", std::process::id());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&server, &address).unwrap();
        rustix::net::listen(&server, 1).unwrap();
        let mut listener = Listener::new(server).unwrap();
        rustix::net::connect(&client, &address).unwrap();
        assert!(is_readable(&listener));
        let limit = getrlimit(Resource::Nofile);
        // One more than none: `poll` refuses as many descriptors as a process may not have.
        setrlimit(Resource::Nofile, Rlimit { current: Some(1), ..limit }).unwrap();
        assert!(listener.accept().is_none() && !is_readable(&listener));
        listener.tick();
        assert!(is_readable(&listener) && listener.accept().is_none() && !is_readable(&listener));
        setrlimit(Resource::Nofile, limit).unwrap();
        listener.tick();
        assert!(is_readable(&listener) && listener.accept().is_some() && !is_readable(&listener));
    }
}
