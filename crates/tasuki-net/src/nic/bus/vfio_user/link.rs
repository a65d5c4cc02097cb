//! The connection to a server. It sends a command, or several of one kind at a time, and checks the answers in the
//! order of the requests. It stays silent once the server has failed.
//!
//! An answer leaves the socket in one piece: the client peeks at its header, then receives all of it by one call. So
//! a client that is killed at any time leaves the stream whole for the clients that share the connection
//! (`turns.rs`). That holds for servers that send an answer in one piece, as all servers do that we know. It does
//! not hold for requests of a server, which no server that we know sends.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::super::BusError;
use super::turns::{Behind, Turns};
use super::wire::{Breach, Command, FDS_MAX, HEADER_LEN, Incoming, Limits, Message};

/// Time to poll for an answer before the process sleeps until it comes: a wake-up costs more than most answers take.
const SPIN: Duration = Duration::from_micros(50);

/// Time to poll for a caller [in a hurry](Link::hurry). A card's server takes a quarter of a millisecond to release
/// memory. A process that slept meanwhile would get its CPU back only after the process that has it by then.
const HURRY: Duration = Duration::from_micros(500);

/// Number of requests without polling after a poll was in vain.
const VAIN: u32 = 16;

/// Maximum number of requests from a server before its answer. A server that sends more does not mean to answer.
const QUESTIONS_MAX: u32 = 64;

/// Number of bytes of a skipped answer received at once: the longest answer to our requests.
const SKIPPED_MAX: usize = 4096;

/// Maximum size in bytes of the collected messages.
const COLLECTED_MAX: usize = 2048;

/// Time to wait for the rest of a header. Servers send it as a whole.
const DRIBBLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000 };

/// Reason why the server cannot be used any more.
#[derive(Debug, Clone)]
enum Fault {
    /// The server closed the connection.
    Gone,
    /// The server did not answer in time.
    Silent,
    /// The server broke a rule.
    Breach(Breach),
}

impl Fault {
    fn to_error(&self, doing: &'static str) -> BusError {
        match self {
            Fault::Gone => BusError::Gone { doing },
            Fault::Silent => BusError::Silent { doing },
            Fault::Breach(what) => BusError::Protocol { what: what.clone() },
        }
    }
}

impl From<Errno> for Fault {
    /// Converts a timeout or a failing socket: in either case the server does not answer.
    fn from(errno: Errno) -> Self {
        if errno == Errno::AGAIN { Fault::Silent } else { Fault::Gone }
    }
}

/// Decides whether to poll for an answer before sleeping. A server that shares our CPU cannot answer while we poll.
/// Yielding to it does not help: on kernels since 6.12 a process that yields may not run again before the next tick,
/// while a process that sleeps is woken by the answer.
#[derive(Debug, Default)]
struct Looks {
    /// CPU on which a poll was in vain, and the number of requests left to sleep for there.
    vain: Cell<Option<(usize, u32)>>,
    hurries: bool,
}

impl Looks {
    /// Returns the time to poll.
    fn limit(&self) -> Duration {
        if self.hurries { HURRY } else { SPIN }
    }

    /// Returns whether to poll now. A worker that has moved to another CPU starts anew.
    fn is_worth(&self) -> bool {
        match self.vain.get() {
            Some((cpu, left)) if left > 0 && cpu == rustix::thread::sched_getcpu() => {
                self.vain.set(Some((cpu, left - 1)));
                false
            }
            _ => true,
        }
    }

    /// Records whether the poll found an answer.
    fn learn(&self, found: bool) {
        self.vain.set((!found).then(|| (rustix::thread::sched_getcpu(), VAIN)));
    }
}

/// Descriptors that came with an answer.
pub type Fds = ArrayVec<OwnedFd, FDS_MAX>;

/// A request, to be sent together with others of its kind.
#[derive(Debug)]
pub struct Question<'a, F> {
    /// Messages without an answer that are sent before it.
    pub ahead: &'a [u8],
    /// Function that writes its body.
    pub fill: F,
    pub fds: &'a [BorrowedFd<'a>],
    /// Buffer for the body of its answer.
    pub answer: &'a mut [u8],
}

/// Client end of a connection, with the limits that both sides agreed on.
#[derive(Debug)]
pub struct Link {
    socket: Option<OwnedFd>,
    pub limits: Limits,
    timeout: Duration,
    next: u16,
    fault: Option<Fault>,
    behind: Arc<Behind>,
    /// Whether messages without an answer are collected in `collected`: a system call for each costs more than the
    /// message itself.
    corked: bool,
    collected: RefCell<Vec<u8>>,
    /// Set once other clients have the connection, too.
    turns: Option<Turns>,
    strays: u64,
    looks: Looks,
}

impl Link {
    /// Returns a link over `socket` that waits for an answer no longer than `timeout`.
    pub fn new(socket: OwnedFd, limits: Limits, timeout: Duration) -> io::Result<Self> {
        // Wait in the socket itself: that saves a system call per reply, compared to poll.
        rustix::io::ioctl_fionbio(&socket, false)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(timeout))?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        let (fault, behind, turns) = (None, Arc::default(), None);
        let (corked, collected) = (false, RefCell::new(Vec::with_capacity(COLLECTED_MAX)));
        let (next, strays, looks) = (0, 0, Looks::default());
        Ok(Link { socket: Some(socket), limits, timeout, next, fault, behind, corked, collected, turns, strays, looks })
    }

    /// Sets whether to poll longer for answers before sleeping.
    pub fn hurry(&mut self, hurries: bool) {
        self.looks.hurries = hurries;
    }

    /// Returns the state that says whether the server may still have messages to process.
    pub fn behind(&self) -> Arc<Behind> {
        Arc::clone(&self.behind)
    }

    /// Shares the connection: from now on, other clients send requests on it as well.
    pub fn share(&mut self, turns: Turns) {
        turns.tell(&self.behind);
        self.turns = Some(turns);
    }

    /// Returns the descriptor that every other client needs for its requests: the same for all.
    pub fn turns(&mut self, doing: &'static str) -> Result<OwnedFd, BusError> {
        let refused = |source| BusError::Refused { doing, source };
        if self.turns.is_none() {
            let turns = Turns::create(self.next);
            self.share(turns.map_err(|error| refused(io::Error::other(error)))?);
        }
        self.turns.as_ref().expect("just made").copy().map_err(refused)
    }

    /// Returns the number of answers that were skipped because the client that had asked was gone.
    pub fn strays(&self) -> u64 {
        self.strays
    }

    /// Takes the connection away. All other holders of the link find the device gone.
    pub fn take(&mut self, doing: &'static str) -> Result<OwnedFd, BusError> {
        if let Some(fault) = &self.fault {
            return Err(fault.to_error(doing));
        }
        self.socket.take().ok_or(BusError::Gone { doing })
    }

    /// Returns another descriptor of the connection.
    pub fn copy(&self, doing: &'static str) -> Result<OwnedFd, BusError> {
        let copy = self.socket(doing)?.try_clone_to_owned();
        copy.map_err(|source| BusError::Refused { doing, source })
    }

    fn fail<T>(&mut self, doing: &'static str, fault: Fault) -> Result<T, BusError> {
        let error = fault.to_error(doing);
        self.fault.get_or_insert(fault);
        // Close our end, so that the server notices, too.
        self.socket = None;
        Err(error)
    }

    /// Records that the server broke a rule, and closes the connection.
    pub fn breach<T>(&mut self, what: Breach) -> Result<T, BusError> {
        self.fail("", Fault::Breach(what))
    }

    /// Returns the connection, unless it has failed before.
    fn socket(&self, doing: &'static str) -> Result<BorrowedFd<'_>, BusError> {
        match (&self.fault, &self.socket) {
            (Some(fault), _) => Err(fault.to_error(doing)),
            (None, Some(socket)) => Ok(socket.as_fd()),
            (None, None) => Err(BusError::Gone { doing }),
        }
    }

    fn next_id(&mut self) -> u16 {
        self.next = self.next.wrapping_add(1);
        self.next
    }

    /// Sends `command` with the body that `fill` writes, and stores the body of the answer in `answer`. Returns the
    /// length of that body in bytes, and the descriptors that came with it. At most `fds_max` descriptors are
    /// allowed.
    pub fn call(
        &mut self,
        doing: &'static str,
        command: Command,
        fill: impl Fn(&mut Message),
        fds: &[BorrowedFd<'_>],
        answer: &mut [u8],
        fds_max: usize,
    ) -> Result<(usize, Fds), BusError> {
        let [(outcome, fds)] = self.call_each(doing, command, [Question { ahead: &[], fill, fds, answer }], fds_max)?;
        Ok((outcome?, fds))
    }

    /// Sends several requests of one kind before it waits for the answers, which takes the time of one trip to the
    /// server instead of many. Returns for each request the length of its answer's body in bytes, or the server's
    /// refusal. After a refusal the server still processes the later requests.
    #[expect(clippy::type_complexity, reason = "what `call` says, of each")]
    pub fn call_each<F: Fn(&mut Message), const N: usize>(
        &mut self,
        doing: &'static str,
        command: Command,
        questions: [Question<'_, F>; N],
        fds_max: usize,
    ) -> Result<[(Result<usize, BusError>, Fds); N], BusError> {
        let mut strays = 0;
        let outcome = self.exchange(doing, command, questions, &mut strays)?;
        self.strays += strays;
        let answers = match outcome {
            Ok(answers) => answers,
            Err(fault) => return self.fail(doing, fault),
        };
        // The server has processed all earlier messages.
        self.behind.answered();
        let mut said = ArrayVec::<_, N>::new();
        for answer in answers {
            said.push(match answer {
                Answer::Reply(_, fds) if fds.len() > fds_max => {
                    return self.breach(format!("{} descriptors came with an answer to {command:?}", fds.len()));
                }
                Answer::Reply(len, fds) => (Ok(len), fds),
                Answer::Refusal(errno) => {
                    (Err(BusError::Refused { doing, source: io::Error::from_raw_os_error(errno) }), Fds::new())
                }
            });
        }
        Ok(said.into_inner().unwrap_or_else(|_| unreachable!("each was answered")))
    }

    /// Sends the requests, once it is our turn, and waits for the answers.
    fn exchange<F: Fn(&mut Message), const N: usize>(
        &mut self,
        doing: &'static str,
        command: Command,
        questions: [Question<'_, F>; N],
        strays: &mut u64,
    ) -> Result<Result<ArrayVec<Answer, N>, Fault>, BusError> {
        let count = u16::try_from(N).expect("a few");
        let first = self.next.wrapping_add(1);
        self.next = self.next.wrapping_add(count);
        let turn = match self.turns.as_ref().map(|turns| turns.take(count)).transpose() {
            Ok(turn) => turn,
            Err(errno) => return Err(BusError::Refused { doing, source: errno.into() }),
        };
        let first = turn.as_ref().map_or(first, super::turns::Turn::number);
        let ids = (0..count).map(|index| first.wrapping_add(index));
        let deadline = Instant::now() + self.timeout;
        let mut may_be_others = turn.is_some().then_some(strays);
        let socket = self.socket(doing)?;
        let mut collected = self.collected.borrow_mut();
        let sent = ids.clone().zip(&questions).try_for_each(|(id, question)| {
            collected.extend_from_slice(question.ahead);
            let mut message = Message::command(id, command, false);
            (question.fill)(&mut message);
            if question.fds.is_empty() {
                collected.extend_from_slice(message.finish());
                return Ok(());
            }
            // Descriptors go with the message that refers to them.
            send(socket, &collected, &[])?;
            collected.clear();
            send(socket, message.finish(), question.fds)
        });
        let sent = sent.and_then(|()| send(socket, &collected, &[]));
        collected.clear();
        let wait = || {
            let mut answers = ArrayVec::new();
            for (id, question) in ids.zip(questions) {
                let others = may_be_others.as_deref_mut();
                answers.push(await_answer((socket, &self.looks), (id, command), others, deadline, question.answer)?);
            }
            Ok(answers)
        };
        Ok(sent.map_err(Fault::from).and_then(|()| wait()))
    }

    /// Collects [posted](Self::post) messages until the next request.
    pub fn cork(&mut self) {
        self.corked = true;
    }

    /// Sends the collected messages, and stops collecting.
    pub fn uncork(&mut self) {
        self.corked = false;
        self.flush();
    }

    fn flush(&mut self) {
        let collected = self.collected.get_mut();
        if collected.is_empty() {
            return;
        }
        let collected = std::mem::take(collected);
        self.send_all(&collected);
        // Reuse the buffer.
        self.collected = RefCell::new(collected);
        self.collected.get_mut().clear();
    }

    fn send_all(&mut self, bytes: &[u8]) {
        let Ok(socket) = self.socket("") else { return };
        if let Err(errno) = send(socket, bytes, &[]) {
            let _ = self.fail::<()>("", errno.into());
        }
    }

    /// Returns a message that wants no answer.
    pub fn unanswered(&mut self, command: Command, fill: impl FnOnce(&mut Message)) -> Message {
        let mut message = Message::command(self.next_id(), command, true);
        fill(&mut message);
        self.behind.posting();
        message
    }

    /// Sends `command` and wants no answer. The next request shows whether it arrived.
    pub fn post(&mut self, command: Command, fill: impl FnOnce(&mut Message)) {
        let mut message = self.unanswered(command, fill);
        let bytes = message.finish();
        if self.corked {
            if self.collected.get_mut().len() + bytes.len() > COLLECTED_MAX {
                self.flush();
            }
            return self.collected.get_mut().extend_from_slice(bytes);
        }
        self.send_all(bytes);
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    if bytes.is_empty() {
        return Ok(());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        assert!(fits, "a message carries at most {FDS_MAX} descriptors");
    }
    let mut sent = loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => break other?,
        }
    };
    while sent < bytes.len() {
        match rustix::net::send(socket, &bytes[sent..], SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            other => sent += other?,
        }
    }
    Ok(())
}

enum Answer {
    Reply(usize, Fds),
    Refusal(i32),
}

/// Receives messages until the answer to `id` comes. The server may send a request meanwhile: the client answers
/// that it is unsupported. Answers to other clients are skipped and counted if there `may_be_others`.
fn await_answer(
    (socket, looks): (BorrowedFd<'_>, &Looks),
    (id, command): (u16, Command),
    mut may_be_others: Option<&mut u64>,
    deadline: Instant,
    answer: &mut [u8],
) -> Result<Answer, Fault> {
    for _ in 0..QUESTIONS_MAX {
        let header = spin(socket, looks).map_or_else(|| peek(socket, deadline), Ok)?;
        let incoming = Incoming::parse(&header).map_err(Fault::Breach)?;
        match incoming {
            Incoming::Reply { id: its, command: its_command, .. }
            | Incoming::Refusal { id: its, command: its_command, .. }
                if its != id || its_command != command as u16 =>
            {
                if let Some(strays) = &mut may_be_others {
                    **strays += 1;
                    let len = if let Incoming::Reply { len, .. } = incoming { len } else { 0 };
                    skip(socket, len, deadline)?;
                    continue;
                }
                let number = command as u16;
                let what = format!("it answers message {its} ({its_command}) where {id} ({number}) was asked");
                return Err(Fault::Breach(what));
            }
            Incoming::Refusal { errno, .. } => {
                skip(socket, 0, deadline)?;
                return Ok(Answer::Refusal(errno));
            }
            Incoming::Reply { len, .. } => {
                let Some(into) = answer.get_mut(..len as usize) else {
                    return Err(Fault::Breach(format!("its answer to {command:?} has {len} bytes")));
                };
                let mut fds = Fds::new();
                receive(socket, into, Some(&mut fds), deadline)?;
                return Ok(Answer::Reply(len as usize, fds));
            }
            Incoming::Command { id, command, len, posted } => {
                skip(socket, len, deadline)?;
                if !posted {
                    send(socket, Message::unsupported(id, command).finish(), &[])?;
                }
                in_time(deadline)?;
            }
        }
    }
    Err(Fault::Breach(format!("it asks {QUESTIONS_MAX} times and does not answer")))
}

/// Peeks at the header of the next message, and leaves it in the socket.
fn peek(socket: BorrowedFd<'_>, deadline: Instant) -> Result<[u8; HEADER_LEN], Fault> {
    let mut header = [0; HEADER_LEN];
    let mut closed = false;
    loop {
        match rustix::net::recv(socket, &mut header[..], RecvFlags::PEEK) {
            Err(Errno::INTR) => {}
            Ok((HEADER_LEN.., _)) => return Ok(header),
            Ok((len, _)) if len == 0 || closed => return Err(Fault::Gone),
            Ok(_) => {
                in_time(deadline)?;
                let mut hangs_up = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
                closed = rustix::event::poll(&mut hangs_up, Some(&DRIBBLE)).is_ok_and(|count| count > 0);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Polls for a while, if that is worth it, until there is a header or an error.
fn spin(socket: BorrowedFd<'_>, looks: &Looks) -> Option<[u8; HEADER_LEN]> {
    if !looks.is_worth() {
        return None;
    }
    let end = Instant::now() + looks.limit();
    let mut header = [0; HEADER_LEN];
    loop {
        match rustix::net::recv(socket, &mut header[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((HEADER_LEN.., _)) => {
                looks.learn(true);
                return Some(header);
            }
            Err(Errno::AGAIN) if Instant::now() < end => std::hint::spin_loop(),
            // On any other outcome, the blocking wait that follows finds it again.
            _ => {
                looks.learn(false);
                return None;
            }
        }
    }
}

/// Treats a server that keeps sending without answering as silent, once the deadline is over.
fn in_time(deadline: Instant) -> Result<(), Fault> {
    if Instant::now() > deadline { Err(Fault::Silent) } else { Ok(()) }
}

/// Receives a message whose header was [peeked at](peek): the header, and exactly `into`. A server that sends byte
/// by byte has until `deadline` as well, and one timeout more at most.
fn receive(socket: BorrowedFd<'_>, into: &mut [u8], mut fds: Option<&mut Fds>, deadline: Instant) -> Result<(), Fault> {
    let mut header = [0; HEADER_LEN];
    let whole = HEADER_LEN + into.len();
    let mut have = 0;
    while have < whole {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = match fds {
            // The kernel closes descriptors that come unasked.
            None => RecvAncillaryBuffer::default(),
            Some(_) => RecvAncillaryBuffer::new(&mut space),
        };
        let (of_header, of_body) = (have.min(HEADER_LEN), have.saturating_sub(HEADER_LEN));
        let rest = &mut [IoSliceMut::new(&mut header[of_header..]), IoSliceMut::new(&mut into[of_body..])];
        let got = match rustix::net::recvmsg(socket, rest, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        if got.bytes == 0 {
            return Err(Fault::Gone);
        }
        if let Some(fds) = fds.as_deref_mut() {
            for message in control.drain() {
                let RecvAncillaryMessage::ScmRights(rights) = message else { continue };
                for fd in rights {
                    fds.try_push(fd).map_err(|_| Fault::Breach(format!("more than {FDS_MAX} descriptors came")))?;
                }
            }
            if got.flags.contains(ReturnFlags::CTRUNC) {
                return Err(Fault::Breach(format!("more than {FDS_MAX} descriptors came, or more than we may open")));
            }
        }
        have += got.bytes;
        if have < whole {
            in_time(deadline)?;
        }
    }
    Ok(())
}

/// Receives and discards a message whose header was [peeked at](peek), with `len` bytes after the header.
fn skip(socket: BorrowedFd<'_>, len: u32, deadline: Instant) -> Result<(), Fault> {
    let mut rubbish = [0; SKIPPED_MAX];
    let mut left = len as usize;
    let first = left.min(SKIPPED_MAX);
    receive(socket, &mut rubbish[..first], None, deadline)?;
    left -= first;
    while left > 0 {
        let part = left.min(SKIPPED_MAX);
        match rustix::net::recv(socket, &mut rubbish[..part], RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Ok((0, _)) => return Err(Fault::Gone),
            Ok((got, _)) => left -= got,
            Err(errno) => return Err(errno.into()),
        }
        in_time(deadline)?;
    }
    Ok(())
}
