//! The connection to a server: a command, or some of a kind at a time, their answers checked in the order of the questions, and silence once the server has failed.
//!
//! An answer leaves the socket in one piece: its header is looked at first, then all of it is received by one call. So whoever is killed, whenever
//! that is, leaves the stream whole to those that it shared the connection with (`turns.rs`). That holds for servers that send an answer in one
//! piece, as those that we know do; and for questions of a server, which none that we know asks, it does not hold.

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

/// How long an answer is looked for before the process sleeps until it comes: a wake-up costs more than most answers.
const SPIN: Duration = Duration::from_micros(50);

/// The same for whoever [is in a hurry](Link::hurry): a card's server takes a quarter of a millisecond to let go of memory, and the process that sleeps
/// meanwhile comes back to its rings behind whoever had its CPU.
const HURRY: Duration = Duration::from_micros(500);

/// Questions whose answers are slept for at once, after one was looked for in vain.
const VAIN: u32 = 16;

/// A server that asks this often before it answers does not mean to answer.
const QUESTIONS_MAX: u32 = 64;

/// Bytes of an answer that is skipped, received at once: the longest that there is to what we ask.
const SKIPPED_MAX: usize = 4096;

/// Bytes of messages that are collected at most.
const COLLECTED_MAX: usize = 2048;

/// How long is waited for the rest of a header. Servers send it as a whole.
const DRIBBLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000 };

/// Why the server cannot be talked to any more.
#[derive(Debug, Clone)]
enum Fault {
    /// It closed the connection.
    Gone,
    /// It said nothing for too long.
    Silent,
    /// It broke a rule.
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
    /// A timeout, or a socket that fails: either way nobody answers.
    fn from(errno: Errno) -> Self {
        if errno == Errno::AGAIN { Fault::Silent } else { Fault::Gone }
    }
}

/// Whether to look for an answer before sleeping for it. Where a server shares our CPU it cannot answer while we look: yielding to it
/// does not help, for on kernels since 6.12 who yields may not run again before the next tick, while who sleeps is woken by the answer.
#[derive(Debug, Default)]
struct Looks {
    /// The CPU on which one was looked for in vain, and how many are to be slept for there yet.
    vain: Cell<Option<(usize, u32)>>,
    hurries: bool,
}

impl Looks {
    /// How long.
    fn limit(&self) -> Duration {
        if self.hurries { HURRY } else { SPIN }
    }

    /// Whether to look now. A worker that has moved to another CPU starts anew.
    fn is_worth(&self) -> bool {
        match self.vain.get() {
            Some((cpu, left)) if left > 0 && cpu == rustix::thread::sched_getcpu() => {
                self.vain.set(Some((cpu, left - 1)));
                false
            }
            _ => true,
        }
    }

    /// What came of it.
    fn learn(&self, found: bool) {
        self.vain.set((!found).then(|| (rustix::thread::sched_getcpu(), VAIN)));
    }
}

/// What came with an answer.
pub type Fds = ArrayVec<OwnedFd, FDS_MAX>;

/// What is asked, together with others of its kind.
#[derive(Debug)]
pub struct Question<'a, F> {
    /// Messages that want no answer, and go before it.
    pub ahead: &'a [u8],
    /// Writes its body.
    pub fill: F,
    pub fds: &'a [BorrowedFd<'a>],
    /// Where the body of its answer goes.
    pub answer: &'a mut [u8],
}

/// One end of a connection, with what both sides agreed on.
#[derive(Debug)]
pub struct Link {
    socket: Option<OwnedFd>,
    pub limits: Limits,
    timeout: Duration,
    next: u16,
    fault: Option<Fault>,
    behind: Arc<Behind>,
    /// Messages that want no answer, while they are collected: a system call for each costs more than what it says.
    corked: bool,
    collected: RefCell<Vec<u8>>,
    /// Once others have the connection, too.
    turns: Option<Turns>,
    strays: u64,
    looks: Looks,
}

impl Link {
    /// Talks over `socket`, and waits for no answer longer than `timeout`.
    pub fn new(socket: OwnedFd, limits: Limits, timeout: Duration) -> io::Result<Self> {
        // We wait in the socket itself: a reply costs a system call less than with poll.
        rustix::io::ioctl_fionbio(&socket, false)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(timeout))?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        let (fault, behind, turns) = (None, Arc::default(), None);
        let (corked, collected) = (false, RefCell::new(Vec::with_capacity(COLLECTED_MAX)));
        let (next, strays, looks) = (0, 0, Looks::default());
        Ok(Link { socket: Some(socket), limits, timeout, next, fault, behind, corked, collected, turns, strays, looks })
    }

    /// Whether to look for answers for longer before sleeping for them.
    pub fn hurry(&mut self, hurries: bool) {
        self.looks.hurries = hurries;
    }

    /// Whether the server may have something to do yet.
    pub fn behind(&self) -> Arc<Behind> {
        Arc::clone(&self.behind)
    }

    /// From now on, others ask on this connection as well.
    pub fn share(&mut self, turns: Turns) {
        turns.tell(&self.behind);
        self.turns = Some(turns);
    }

    /// What those need who ask, too: the same for all of them.
    pub fn turns(&mut self, doing: &'static str) -> Result<OwnedFd, BusError> {
        let refused = |source| BusError::Refused { doing, source };
        if self.turns.is_none() {
            let turns = Turns::create(self.next);
            self.share(turns.map_err(|error| refused(io::Error::other(error)))?);
        }
        self.turns.as_ref().expect("just made").copy().map_err(refused)
    }

    /// Answers that were found and skipped, since those that had asked were gone.
    pub fn strays(&self) -> u64 {
        self.strays
    }

    /// Takes the connection away. Everybody else who has the link finds the device gone.
    pub fn take(&mut self, doing: &'static str) -> Result<OwnedFd, BusError> {
        if let Some(fault) = &self.fault {
            return Err(fault.to_error(doing));
        }
        self.socket.take().ok_or(BusError::Gone { doing })
    }

    /// Another descriptor of the connection.
    pub fn copy(&self, doing: &'static str) -> Result<OwnedFd, BusError> {
        let copy = self.socket(doing)?.try_clone_to_owned();
        copy.map_err(|source| BusError::Refused { doing, source })
    }

    fn fail<T>(&mut self, doing: &'static str, fault: Fault) -> Result<T, BusError> {
        let error = fault.to_error(doing);
        self.fault.get_or_insert(fault);
        // The server learns that we are gone as well.
        self.socket = None;
        Err(error)
    }

    /// Says that the server broke a rule; nothing is believed from now on.
    pub fn breach<T>(&mut self, what: Breach) -> Result<T, BusError> {
        self.fail("", Fault::Breach(what))
    }

    /// The connection, unless it has failed before.
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

    /// Asks `command` with the body that `fill` writes, and puts the body of the answer into `answer`: says how long it is,
    /// and hands out the descriptors that came with it, of which `fds_max` are allowed.
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

    /// Asks several questions of one kind before it waits for the answers: the time of one trip to the server instead of many. Says of each how long the
    /// body of its answer is, or that the server refused it; a refused one does not keep the server from doing those behind it.
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
        // What was sent before was done before.
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

    /// Asks, when it is our turn, and waits for the answers.
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
            // Descriptors go with the message that speaks of them.
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

    /// Collects what is [posted](Self::post), until somebody asks something.
    pub fn cork(&mut self) {
        self.corked = true;
    }

    /// Sends what was collected; from now on, nothing is.
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
        // Its room is used again.
        self.collected = RefCell::new(collected);
        self.collected.get_mut().clear();
    }

    fn send_all(&mut self, bytes: &[u8]) {
        let Ok(socket) = self.socket("") else { return };
        if let Err(errno) = send(socket, bytes, &[]) {
            let _ = self.fail::<()>("", errno.into());
        }
    }

    /// A message that wants no answer.
    pub fn unanswered(&mut self, command: Command, fill: impl FnOnce(&mut Message)) -> Message {
        let mut message = Message::command(self.next_id(), command, true);
        fill(&mut message);
        self.behind.posting();
        message
    }

    /// Sends `command` and wants no answer. Whether it arrives is learnt from what is asked next.
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

/// Receives until the answer to `id` is there. A server may ask us something meanwhile: it is told that we do not do that. Answers to others are
/// skipped where there `may_be_others`, and counted.
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

/// Looks at the header of what comes next, and leaves it there.
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

/// Waits for a while until there is a header to look at, or nothing ever will be, if that is worth it.
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
            // Whatever it is, who waits for it finds it again.
            _ => {
                looks.learn(false);
                return None;
            }
        }
    }
}

/// Who talks and talks and does not answer says nothing.
fn in_time(deadline: Instant) -> Result<(), Fault> {
    if Instant::now() > deadline { Err(Fault::Silent) } else { Ok(()) }
}

/// Receives a message that was [looked at](peek): its header, and exactly `into`. Whoever sends byte by byte has until `deadline` as well, and one
/// timeout more at most.
fn receive(socket: BorrowedFd<'_>, into: &mut [u8], mut fds: Option<&mut Fds>, deadline: Instant) -> Result<(), Fault> {
    let mut header = [0; HEADER_LEN];
    let whole = HEADER_LEN + into.len();
    let mut have = 0;
    while have < whole {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = match fds {
            // What comes without being asked for, the kernel closes.
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

/// Receives a message that was [looked at](peek), with `len` bytes behind its header, and forgets it.
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
