//! Other processes: this program once more, and programs of the machine.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};
use rustix::process::Signal;
use tasuki_testing::{PATIENCE, Program};

/// Environment variable that is set in other processes: what this process is.
const ROLE: &str = "TASUKI_ROLE";
/// Environment variable with the number of the process that started this one.
const PARENT: &str = "TASUKI_PARENT";
/// Maximum number of descriptors of a message.
const FDS_MAX: usize = 16;

/// This program as another process, with a socket to it that carries whole messages.
pub struct Other {
    pub process: Program,
    pub socket: UnixStream,
}

impl Other {
    /// Starts another process in which the test `test` runs alone, finds `role`, and [`socket`]. The process kills
    /// itself at the crash point `crash`.
    pub fn start(test: &str, role: &str, crash: Option<&str>) -> Self {
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.expect("a pair of sockets");
        let ours = UnixStream::from(ours);
        ours.set_read_timeout(Some(PATIENCE)).expect("a timeout above zero");
        let mut command = this_program(test, role);
        command.envs(crash.map(|crash| ("TASUKI_CRASH", crash))).stdin(theirs).stdout(Stdio::null());
        Other { process: Program(command.spawn().expect("this program can be started again")), socket: ours }
    }
}

/// Returns a command that runs one test of this program, by its whole name.
fn this_program(test: &str, role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(ROLE, role);
    command.env(PARENT, std::process::id().to_string());
    command
}

/// Returns the role of this process, if another one of this program started it.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Has this process end with the one that started it.
fn end_with_parent() {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("a signal");
    let parent = rustix::process::getppid().map(|parent| parent.as_raw_nonzero().to_string());
    if std::env::var(PARENT).ok() != parent {
        std::process::exit(1);
    }
}

/// Returns the socket to the process that started this one, and with which this one ends.
pub fn socket() -> UnixStream {
    end_with_parent();
    UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor is free"))
}

/// Sends a message with descriptors, for which there must be room.
pub fn say(socket: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)), "as many descriptors fit");
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    assert_eq!(sent, Ok(bytes.len()));
}

/// Receives a message with its descriptors; `None` if no sender is left.
pub fn hear(socket: &impl AsFd) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    hear_with(socket, RecvFlags::empty()).expect("a message")
}

/// Like [`hear`], with other flags.
pub fn hear_with(socket: &impl AsFd, flags: RecvFlags) -> rustix::io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let (_, len) = rustix::net::recv(socket, &mut [0; 1][..], flags | RecvFlags::PEEK | RecvFlags::TRUNC)?;
    let mut bytes = vec![0; len];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let into = &mut [IoSliceMut::new(&mut bytes)];
    rustix::net::recvmsg(socket, into, &mut control, flags | RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    let fds = fds.collect();
    Ok((len > 0).then_some((bytes, fds)))
}

/// Returns whether `PATH` has such a program.
pub fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}
