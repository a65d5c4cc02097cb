//! The front ends that are connected: the one that is served, and a second one for a guest that migrates. And how they go
//! to a successor.

use super::channel::HELD_MAX;
use super::*;

/// Maximum number of connections that are accepted in one turn.
const ACCEPTS: usize = 4;

/// How long a successor waits for a newer description of the device than it has.
pub(super) const LATE_NEWS: Duration = Duration::from_millis(100);

/// How long a front end may say nothing after it has connected, or within a message.
const SILENCE: Duration = Duration::from_secs(5);

/// How long a front end says nothing until its set-up counts as over. QEMU's messages are microseconds apart.
const SET_UP_QUIET: Duration = Duration::from_micros(500);

/// How long the set-up of a device that runs lasts at most: its frames wait meanwhile.
const SET_UP_MAX: Duration = Duration::from_millis(10);

/// How long a message waits until the daemon has heard of the change that it makes. QEMU's main loop waits with it.
const DAEMON_TIMEOUT: Duration = Duration::from_millis(1);

/// QEMU 7.2 keeps the features of a driver that starts while there is no connection for itself.
const FORGOTTEN: &str = "the machine's front end names no feature that the guest's driver takes, as QEMU does if its \
     connection was lost while the driver started; if the guest is not reached, bind its driver anew, or reset the machine";

/// QEMU names no memory that is no file, and says nothing of it.
pub(super) const NO_MEMORY: &str = "the machine runs its card and shares no memory, so its guest reaches nobody: give it a \
     memory backend that is a file in memory, with share=on, and name that as memory-backend=";

/// Maximum number of descriptors, and of bytes of text, with which a successor is told of a machine. A second one is left
/// out beyond that, and connects again: the daemon ends a worker that sends more (`CLIENT_FDS_MAX` of the protocol).
const PARTS_FDS_MAX: usize = 144;
const PARTS_TEXT_MAX: usize = 8192;

/// A front end, from its connection on.
#[derive(Debug)]
pub(super) struct FrontEnd {
    pub(super) channel: Channel,
    pub(super) device: Device,
    /// When it connected, until it has said something; or when a message began whose rest has yet to come. A front end may
    /// have sent its own socket with the first part: then the connection does not end with it.
    silent: Option<Instant>,
    /// Whether the daemon has its parts: a worker that dies leaves them to its successor.
    is_kept: bool,
    /// Whether it was found to run a card without memory.
    lacks_memory: bool,
    set_up: Option<SetUp>,
    /// When a set-up was over. A message soon after that is of the same set-up: the front end was not scheduled, or waited
    /// for room in the socket.
    was_set_up_at: Option<Instant>,
}

/// A set-up that goes on. A message stays in the socket until the daemon has the state that it led to, so a successor reads
/// the rest again. A front end that is sent away amid a set-up may forget what its guest's driver wants.
#[derive(Debug)]
struct SetUp {
    heard_at: Instant,
    /// Until when more is expected, if the device runs.
    runs_until: Option<Instant>,
    /// Since when the front end's messages wait for the daemon to hear of the state.
    due_since: Option<Instant>,
    /// Whether more than one message is expected.
    is_long: bool,
}

impl SetUp {
    fn new() -> Self {
        SetUp { heard_at: Instant::now(), runs_until: None, due_since: None, is_long: true }
    }

    /// Returns whether nothing more is expected, of a device that runs.
    fn is_over(&self, now: Instant) -> bool {
        self.runs_until.is_some_and(|until| now >= until || self.is_still(now))
    }

    fn is_still(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.heard_at) >= SET_UP_QUIET
    }
}

impl FrontEnd {
    /// Serves the front end behind `channel`.
    pub(super) fn new(channel: Channel, device: Device) -> Self {
        FrontEnd {
            channel,
            device,
            silent: Some(Instant::now()),
            is_kept: false,
            lacks_memory: false,
            set_up: None,
            was_set_up_at: None,
        }
    }

    /// Serves the front end of a predecessor.
    fn again(channel: Channel, device: Device) -> Self {
        let silent = device.has_heard_nothing().then(Instant::now);
        FrontEnd { silent, is_kept: true, ..FrontEnd::new(channel, device) }
    }

    /// Handles the front end's next message. Returns whether there was one: another may be behind it.
    fn hear(&mut self) -> Result<bool, Refusal> {
        if self.waits() {
            return Ok(false);
        }
        let heard = self.channel.hear(&mut self.device, self.set_up.is_some())?;
        if heard {
            self.set_up.iter_mut().for_each(|it| it.heard_at = Instant::now());
            self.silent = None;
        } else if self.channel.is_within() {
            self.silent.get_or_insert_with(Instant::now);
        }
        Ok(heard)
    }

    /// Takes note of where its set-up is. Returns whether frames wait for its end.
    pub(super) fn look_at_set_up(&mut self) -> bool {
        let (runs, held) = (self.device.is_running(), self.channel.held());
        if !self.is_kept || runs && held == 0 && self.set_up.is_none() {
            return false;
        }
        let now = Instant::now();
        // A device that runs is seldom changed more than once.
        let goes_on = self.was_set_up_at.is_some_and(|at| now.saturating_duration_since(at) < SET_UP_MAX);
        let is_change = runs && self.set_up.is_none() && !goes_on;
        let it = self.set_up.get_or_insert_with(|| SetUp { is_long: !is_change, ..SetUp::new() });
        it.runs_until = it.runs_until.or(Some(if is_change { now } else { now + SET_UP_MAX })).filter(|_| runs);
        let is_over = it.is_over(now) || held > 0 && it.is_still(now);
        let is_due = is_over || self.channel.is_asked() || self.device.has_closed || held == HELD_MAX;
        it.due_since = it.due_since.or(Some(now)).filter(|_| is_due);
        runs
    }

    /// Returns whether the front end waits for the daemon to hear of its device.
    pub(super) fn waits(&self) -> bool {
        self.set_up.as_ref().is_some_and(|it| it.due_since.is_some())
    }

    /// Returns whether there is more to do for its set-up, though nothing comes.
    pub(super) fn is_amid_set_up(&self) -> bool {
        self.set_up
            .as_ref()
            .is_some_and(|it| it.runs_until.is_some() || it.due_since.is_some() || self.channel.held() > 0)
    }

    /// Answers what was handled in this turn, which is committed; amid a set-up only once the daemon has heard of it, or will
    /// not.
    pub(super) fn commit(&mut self) -> Result<(), Refusal> {
        let is_ripe = |it: &SetUp| it.due_since.is_some_and(|since| since.elapsed() >= DAEMON_TIMEOUT);
        if self.set_up.as_ref().is_none_or(is_ripe) { self.let_go() } else { Ok(()) }
    }

    /// Lets go of the messages that were handled. The last of a set-up ends it.
    pub(super) fn let_go(&mut self) -> Result<(), Refusal> {
        self.device.has_closed = false;
        if let Some(it) = &mut self.set_up {
            it.due_since = None;
            let now = Instant::now();
            let over = self.set_up.take_if(|it| it.is_over(now));
            self.was_set_up_at = over.filter(|it| it.is_long).map(|_| now).or(self.was_set_up_at);
        }
        if self.channel.held() == 0 {
            return Ok(());
        }
        let is_asked = self.channel.is_asked();
        self.device.let_go(is_asked);
        self.channel.answer()?;
        if is_asked {
            self.device.let_go(false);
        }
        Ok(())
    }

    /// Returns whether its device is as it said last, and the daemon has heard of that.
    pub(super) fn rests(&self) -> bool {
        let has_said_all = self.channel.held() == 0 && !self.channel.is_within() && !self.channel.is_readable();
        self.is_kept && self.set_up.is_none() && has_said_all
    }

    /// Returns the descriptors for a successor, the socket first.
    fn fds(&self) -> impl Iterator<Item = &OwnedFd> {
        [self.channel.socket()].into_iter().chain(self.device.fds())
    }

    /// Returns whether it runs a card without memory, the first time that this is found.
    pub(super) fn is_found_without_memory(&mut self) -> bool {
        let lacks = self.device.lacks_memory();
        lacks && !std::mem::replace(&mut self.lacks_memory, lacks)
    }

    /// Returns whether it is to be sent away if it goes on to say nothing.
    pub(super) fn is_silent(&self) -> bool {
        self.silent.is_some()
    }

    /// Returns why it is to be sent away, if it has said nothing for too long.
    fn silence(&self, now: Instant) -> Option<Refusal> {
        let is_silent = now.saturating_duration_since(self.silent?) >= SILENCE;
        is_silent.then_some(if self.channel.is_within() { Refusal::Unfinished } else { Refusal::Silent })
    }
}

impl Guest {
    /// Reads the messages of both front ends, and accepts connections.
    pub(super) fn hear(&mut self) {
        self.must_hear = false;
        let running =
            |guest: &Self| guest.front_end.as_ref().filter(|_| guest.is_running()).map(|it| it.channel.number());
        let was_running = running(self);
        let may_hear = !self.lends() && self.broken.is_none();
        if let Some(front_end) = self.front_end.as_mut().filter(|_| may_hear) {
            let before = front_end.device.version();
            let heard = front_end.hear();
            if front_end.device.version() != before {
                self.has_news = true;
                self.polling.look_at_all();
            }
            match heard {
                Ok(heard) => (self.heard, self.must_hear) = (self.heard || heard, self.must_hear || heard),
                Err(refusal) => self.end(&refusal),
            }
        }
        self.hear_other();
        let runs = running(self);
        if runs.is_some() && runs != was_running {
            self.clients.attached += 1;
            self.shortage.since = Default::default();
            if self.front_end.as_ref().is_some_and(|front_end| front_end.device.takes_nothing()) {
                self.trouble = Some(FORGOTTEN.to_owned());
            }
            // The last interrupt by another back end, or by the machine from which the guest came, may have been lost.
            self.must_ring = true;
        }
        match runs {
            Some(_) => self.moves = None,
            None if was_running.is_some() && self.other.is_some() => self.moves = Some(Instant::now()),
            None => {}
        }
        if self.stale.is_some() || self.must_hear {
            // The place may be taken or free: it is known soon, and a new front end waits for it.
            return;
        }
        if !self.must_accept && self.front_end.is_some() || self.front_end.is_none() && self.awaits_pairs() {
            return;
        }
        for _ in 0..ACCEPTS {
            let Some(socket) = self.listener.accept() else {
                self.must_accept = false;
                return;
            };
            if self.other.is_some() {
                self.refuse(
                    "a third front end connected, and was sent away: the node has a machine, and a second one to which \
                     it migrates; give each virtual machine a node of its own"
                        .to_owned(),
                );
                continue;
            }
            if self.listener.watch(socket.as_fd()).is_ok() {
                let device = Device::new(self.version, self.journal.clone());
                let front_end = Some(Box::new(FrontEnd::new(Channel::new(socket), device)));
                self.has_news = true;
                if self.front_end.is_none() {
                    self.front_end = front_end;
                } else {
                    self.other = front_end;
                    self.let_other_go(false);
                }
            }
        }
    }

    /// Reads the messages of the second front end. Serves it from now on if its device runs, and the first one's does
    /// not.
    fn hear_other(&mut self) {
        let Some(mut other) = self.other.take() else { return };
        let before = other.device.version();
        let heard = other.hear().map(|heard| self.must_hear |= heard);
        self.has_news |= other.device.version() != before;
        match (heard, other.device.is_running(), self.is_running()) {
            (Ok(()), true, true) => self.end_other(
                &other,
                "a second front end started its device, and was sent away: the node's machine still runs; give each virtual \
                 machine a node of its own"
                    .to_owned(),
            ),
            (Ok(()), true, false) => {
                self.other = self.front_end.take();
                self.let_other_go(false);
                self.serve(other);
            }
            (Ok(()), false, _) => self.other = Some(other),
            (Err(refusal), ..) => self.refuse_other(&other, &refusal),
        }
    }

    /// Sends away the front end of the second machine, which was taken out.
    pub(super) fn refuse_other(&mut self, other: &FrontEnd, refusal: &Refusal) {
        if *refusal == Refusal::Left {
            self.hang_up_other(other);
        } else {
            self.end_other(other, format!("the front end of a second machine was sent away: {refusal}"));
        }
    }

    fn end_other(&mut self, other: &FrontEnd, sentence: String) {
        self.hang_up_other(other);
        self.refuse(sentence);
    }

    fn hang_up_other(&mut self, other: &FrontEnd) {
        other.channel.hang_up();
        self.has_news = true;
        // Other processes may have the socket: it was served, perhaps.
        self.must_watch = true;
    }

    fn refuse(&mut self, sentence: String) {
        self.clients.refused += 1;
        self.trouble = Some(sentence);
    }

    /// Notes what leaves the socket of the second machine's front end, and whether it waits for an answer.
    fn let_other_go(&self, is_asked: bool) {
        if let Some((journal, other)) = self.journal.as_ref().zip(self.other.as_ref()) {
            journal.let_other_go(other.channel.number(), other.device.version(), is_asked);
        }
    }

    /// Answers what was handled of the second machine's front end in this turn.
    pub(super) fn answer_other(&mut self) {
        let Some(is_asked) = self.other.as_ref().filter(|it| it.channel.held() > 0).map(|it| it.channel.is_asked())
        else {
            return;
        };
        self.let_other_go(is_asked);
        let answered = self.other.as_mut().map_or(Ok(()), |other| other.channel.answer());
        match answered {
            Ok(()) if is_asked => self.let_other_go(false),
            Ok(()) => {}
            Err(refusal) => {
                if let Some(other) = self.other.take() {
                    self.refuse_other(&other, &refusal);
                }
            }
        }
    }

    /// Goes on with the second machine's front end of a predecessor, if that has told all that it had heard of it. It must
    /// connect again otherwise.
    fn go_on_with_other(&mut self, mut other: Box<FrontEnd>) {
        let number = other.channel.number();
        let went = self.journal.as_ref().and_then(|journal| journal.has_let_other_go(number));
        if self.other.is_some() || went != Some(other.device.version()) {
            return other.channel.hang_up();
        }
        other.channel.take_over();
        other.device.journal = self.journal.clone();
        (self.other, self.must_hear) = (Some(other), true);
    }

    /// Serves another machine from now on.
    fn serve(&mut self, mut front_end: Box<FrontEnd>) {
        front_end.device.follow(self.version());
        self.front_end = Some(front_end);
        // The daemon has not heard of it: as after a message, no frame moves in this turn.
        (self.has_news, self.must_hear, self.heard) = (true, true, true);
        self.must_watch = true;
        self.polling.look_at_all();
    }

    /// Returns the number of the state of the device that is served, or was last.
    fn version(&self) -> u32 {
        self.front_end.as_ref().or(self.other.as_ref()).map_or(self.version, |front_end| front_end.device.version())
    }

    /// Ends the connection of the machine that is served.
    pub(super) fn end(&mut self, refusal: &Refusal) {
        if self.borrower.is_some() {
            self.end_borrowing(loans::State::Broken);
            return self.trouble = Some(format!("the machine's front end was sent away: {refusal}"));
        }
        if self.lender.is_out && self.front_end.is_some() {
            // Once all pairs are back.
            (self.lender.calls, self.must_hear) = (true, true);
            return self.broken = Some(refusal.clone());
        }
        let Some(mut front_end) = self.front_end.take() else { return };
        // The guest may wait for what the next back end takes for given.
        front_end.device.flush();
        front_end.device.leave(self.marks.as_ref().filter(|_| *refusal == Refusal::Stale));
        self.has_news = true;
        // A description of this machine does not count any more.
        self.version = front_end.device.version().wrapping_add(1);
        if *refusal != Refusal::Left {
            self.refuse(format!("the machine's front end was sent away: {refusal}"));
        }
        front_end.channel.hang_up();
        match self.other.take() {
            Some(other) => self.serve(other),
            None => self.must_watch = true,
        }
    }

    /// Ends the connection of a machine of which no newer description has come.
    pub(super) fn end_stale(&mut self) {
        if let Some((mut front_end, _)) = self.stale.take_if(|(_, since)| since.elapsed() >= LATE_NEWS) {
            // The mark is of a later state: no number comes twice.
            front_end.device.follow(self.version);
            self.front_end = Some(front_end);
            self.end(&Refusal::Stale);
            self.must_hear = true;
        }
    }

    /// Ends the connections of front ends that have said nothing for too long.
    pub(super) fn end_silent(&mut self, now: Instant) {
        if let Some(refusal) = self.front_end.as_ref().and_then(|front_end| front_end.silence(now)) {
            self.end(&refusal);
        }
        if let Some(refusal) = self.other.as_ref().and_then(|other| other.silence(now))
            && let Some(other) = self.other.take()
        {
            self.refuse_other(&other, &refusal);
        }
    }

    /// Watches what has come since the last sleep, and nothing that has gone.
    pub(super) fn watch_news(&mut self) {
        if let Some(FrontEnd { device, .. }) = self.front_end.as_deref_mut() {
            let (bits, has_gone) = (std::mem::take(&mut device.kicks_came), std::mem::take(&mut device.has_kick_gone));
            let mut came = device.numbered_kicks().filter(|(ring, _)| bits >> ring & 1 == 1);
            // Without memory for one, all are watched anew.
            let all_watched = came.all(|(ring, kick)| {
                // A kick of before wakes nobody: the rings are looked at next.
                tasuki_shm::wake::drain(kick);
                self.listener.watch_bell(ring, kick).is_ok()
            });
            self.must_watch |= has_gone || !all_watched;
            if bits != 0 {
                self.polling.look_at_all();
            }
        }
        if self.must_watch {
            self.watch_anew();
        }
    }

    /// Watches the listener, both sockets, and the eventfds that the machine has now, if others may be watched: the front
    /// end may have those open, too. Nobody reads those of the second machine.
    fn watch_anew(&mut self) {
        self.polling.look_at_all();
        // A borrower hears no front end, and a lender not its own while it has called pairs in.
        let own = self.front_end.iter().filter(|_| !self.lender.has_called());
        let heard = own.chain(&self.other).filter(|_| self.borrower.is_none());
        let sockets = heard.map(|front_end| front_end.channel.socket());
        let kicks = || self.front_end.iter().flat_map(|front_end| front_end.device.numbered_kicks());
        // A kick of before wakes nobody: the rings are looked at next. A borrower without pairs leaves it to the lender.
        if self.borrower.as_ref().is_none_or(|borrower| borrower.serves_pairs()) {
            kicks().for_each(|(_, kick)| tasuki_shm::wake::drain(kick));
        }
        // Without a descriptor for that, the next sleep tries again: a tick ends the present one.
        self.must_watch = self.listener.watch_only(sockets.map(AsFd::as_fd), kicks()).is_err();
    }

    /// Goes on with the machine of a predecessor.
    pub(super) fn go_on_now(&mut self, mut front_end: Box<FrontEnd>, other: Option<Box<FrontEnd>>) {
        let mut ours = self.front_end.iter().chain(&self.other).map(|ours| ours.channel.number());
        if ours.any(|number| number == front_end.channel.number()) {
            return;
        }
        if self.front_end.is_some() {
            // It came too late, and nobody else serves it.
            [Some(front_end), other].iter().flatten().for_each(|late| late.channel.hang_up());
            return;
        }
        // The daemon hears from us when this machine leaves only if it has heard of it from us before.
        self.has_news = true;
        (front_end.device.journal, front_end.device.lent) = (self.journal.clone(), self.lent());
        let FrontEnd { channel, device, .. } = &mut *front_end;
        channel.take_over();
        let went = device.go_on(self.marks.as_ref(), || channel.has_more());
        if went == Err(Refusal::Stale) {
            self.stale = Some((front_end, Instant::now()));
            other.iter().for_each(|other| other.channel.hang_up());
            return;
        }
        self.stale = None;
        let is_amid = went == Ok(true);
        if is_amid {
            front_end.set_up = Some(SetUp::new());
        }
        // The first turn is for frames.
        (self.front_end, self.must_hear, self.must_ring) = (Some(front_end), is_amid, true);
        self.must_watch = true;
        other.into_iter().for_each(|other| self.go_on_with_other(other));
        self.polling.look_at_all();
        if let Err(refusal) = went {
            self.end(&refusal);
        }
    }
}

impl Connection for Guest {
    fn has_news(&self) -> bool {
        self.has_news
    }

    /// A set-up has hundreds of messages in a row, and the parts of a machine are many.
    fn is_settled(&self) -> bool {
        !self.must_hear
    }

    fn waits(&self) -> bool {
        self.front_end.as_ref().is_some_and(|front_end| front_end.waits())
    }

    fn told(&mut self) {
        if let Some(front_end) = &mut self.front_end {
            front_end.is_kept = true;
            if let Err(refusal) = front_end.let_go() {
                self.end(&refusal);
            }
        }
    }

    fn parts(&mut self) -> io::Result<Option<Parts>> {
        if self.borrower.is_some() {
            return self.borrower_parts();
        }
        self.has_news = false;
        let (front_end, other) = match (&self.front_end, &self.inherited) {
            (Some(front_end), _) => (front_end, &self.other),
            (None, Some(front_end)) => (front_end, &self.inherited_other),
            (None, None) => return Ok(None),
        };
        let fits = |other: &&FrontEnd| {
            front_end.fds().chain(other.fds()).count() <= PARTS_FDS_MAX
                && front_end.device.text(Some(&other.device)).len() <= PARTS_TEXT_MAX
        };
        let other = other.as_deref().filter(fits);
        let fds = front_end.fds().chain(other.into_iter().flat_map(FrontEnd::fds));
        let of_other = other.map_or(0, |it| it.channel.number() << 16 ^ u64::from(it.device.version()) ^ 1 << 15);
        Ok(Some(Parts {
            name: "a virtual machine".to_owned(),
            number: front_end.channel.number(),
            version: of_other << 32 | u64::from(front_end.device.version()),
            text: front_end.device.text(other.map(|other| &other.device)),
            fds: fds.map(OwnedFd::try_clone).collect::<io::Result<_>>()?,
        }))
    }

    /// The device does not change while pairs are out. The second machine's front end may.
    fn stays_as_told(&mut self) -> bool {
        let is_out = self.lender.is_out;
        if let Some(other) = self.other.take_if(|_| is_out) {
            self.end_other(
                &other,
                "the front end of a second machine was sent away: its descriptors cannot be copied; raise RLIMIT_NOFILE"
                    .to_owned(),
            );
        }
        is_out
    }

    fn go_on(&mut self, parts: Parts) -> Result<(), String> {
        if self.borrower.is_some() {
            return self.hear_of_device(parts);
        }
        let Parts { text, mut fds, .. } = parts;
        if fds.is_empty() {
            return Err("no socket came with a virtual machine; rebuild the older of daemon and worker".to_owned());
        }
        let socket = fds.remove(0);
        let channel = Channel::new(socket);
        // A front end that no successor can serve has to connect again.
        let (device, other) = Device::again(&text, fds).inspect_err(|_| channel.hang_up())?;
        let front_end = Box::new(FrontEnd::again(channel, device));
        let other = other.map(|(socket, device)| Box::new(FrontEnd::new(Channel::new(socket), device)));
        if self.serves {
            self.go_on_now(front_end, other);
        } else {
            (self.inherited, self.inherited_other) = (Some(front_end), other);
        }
        Ok(())
    }

    fn forget(&mut self, number: u64) {
        if self.borrower.is_some() {
            return self.forget_device(number);
        }
        if self.inherited.take_if(|front_end| front_end.channel.number() == number).is_some() {
            self.inherited_other = None;
        }
    }

    fn keeps_gone(&mut self) -> bool {
        if !self.serves {
            self.forget_gone();
        }
        self.borrower.as_ref().is_some_and(|borrower| borrower.keeps_gone())
    }

    fn dismiss(&mut self, why: Dismissal) {
        if self.borrower.is_some() {
            // A successor goes on with the loan.
            if self.serves && why == Dismissal::Over {
                self.end_borrowing(loans::State::Returned);
                self.serves = false;
            }
            return;
        }
        let settles = self.call_in();
        if self.lender.is_out && why == Dismissal::Moved {
            // A borrower that has no worker now needs the machine's memory to say where its pairs stand. The daemon has the
            // description, since the borrower was ready by it and the device has not changed: the successor calls them in.
            return;
        }
        self.lender.is_out = false;
        self.other.take().into_iter().for_each(|other| other.channel.hang_up());
        self.end(&Refusal::Left);
        self.lender.settles = settles;
        if why == Dismissal::Over {
            // No turn follows.
            self.settle_loans();
        }
    }
}
