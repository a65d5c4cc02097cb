//! The machines that are connected: one that is served, and a second for a guest that migrates. And how they go to a
//! successor.

use super::channel::HELD_MAX;
use super::*;

/// Maximum number of connections that are accepted in one turn.
const ACCEPTS: usize = 4;

/// How long a description may be on its way that is newer than the one that a successor has.
pub(super) const LATE_NEWS: Duration = Duration::from_millis(100);

/// How long a front end may say nothing after it has connected, or within a message.
const SILENCE: Duration = Duration::from_secs(5);

/// How long nothing comes from a front end that has set its device up. QEMU's messages are microseconds apart.
const PAUSE: Duration = Duration::from_micros(500);

/// How long a device that runs counts as one that is set up: its frames wait meanwhile.
const SET_UP_MAX: Duration = Duration::from_millis(10);

/// How long a front end waits for a daemon that takes no message: QEMU's main loop waits with it.
const PATIENCE: Duration = Duration::from_millis(1);

/// QEMU 7.2 keeps the features of a driver that starts while there is no connection for itself.
const FORGOTTEN: &str = "the machine's front end names no feature that the guest's driver takes, as QEMU does if its \
     connection was lost while the driver started; if the guest is not reached, bind its driver anew, or reset the machine";

/// A front end, from its connection on.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) channel: Channel,
    pub(super) device: Device,
    /// When it connected, until it has said something; or when a message began whose rest has yet to come. What came with
    /// that part may keep the connection open after the front end has gone: its own socket.
    silent: Option<Instant>,
    /// Whether the daemon has its parts: a worker that dies leaves them to its successor.
    is_kept: bool,
    set_up: Option<SetUp>,
    /// When a set-up was over. What comes soon after that is of the same one: its front end was not scheduled, or waited for
    /// room in the socket.
    was_set_up_at: Option<Instant>,
}

/// A front end that changes its device: each message leaves its socket once the daemon has heard what it led to, so a
/// successor hears the others. A front end that is sent away amid a set-up may forget what its guest's driver wants.
#[derive(Debug)]
struct SetUp {
    heard_at: Instant,
    /// Until when more is expected, if the device runs.
    runs_until: Option<Instant>,
    /// Since when the front end waits for the daemon to hear of it.
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
        now.saturating_duration_since(self.heard_at) >= PAUSE
    }
}

impl Machine {
    /// Serves the front end behind `channel`.
    pub(super) fn new(channel: Channel, device: Device) -> Self {
        Machine { channel, device, silent: Some(Instant::now()), is_kept: false, set_up: None, was_set_up_at: None }
    }

    /// Goes on with the front end of a predecessor.
    fn again(channel: Channel, device: Device) -> Self {
        let silent = device.has_heard_nothing().then(Instant::now);
        Machine { silent, is_kept: true, ..Machine::new(channel, device) }
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
        let is_ripe = |it: &SetUp| it.due_since.is_some_and(|since| since.elapsed() >= PATIENCE);
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
            |guest: &Self| guest.machine.as_ref().filter(|_| guest.is_running()).map(|it| it.channel.number());
        let was_running = running(self);
        if let Some(machine) = &mut self.machine {
            let before = machine.device.session();
            let heard = machine.hear();
            if machine.device.session() != before {
                self.has_news = true;
                self.look_at_all();
            }
            match heard {
                Ok(heard) => (self.heard, self.must_hear) = (heard, self.must_hear || heard),
                Err(refusal) => self.end(&refusal),
            }
        }
        self.hear_other();
        let runs = running(self);
        if runs.is_some() && runs != was_running {
            self.clients.attached += 1;
            self.shortages = Default::default();
            if self.machine.as_ref().is_some_and(|machine| machine.device.takes_nothing()) {
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
        if !self.must_accept && self.machine.is_some() {
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
                let device = Device::new(self.session, self.journal.clone());
                let machine = Some(Box::new(Machine::new(Channel::new(socket), device)));
                if self.machine.is_none() {
                    (self.machine, self.has_news) = (machine, true);
                } else {
                    self.other = machine;
                }
            }
        }
    }

    /// Reads the messages of the second front end. Serves it from now on if its device runs, and the first one's does
    /// not.
    fn hear_other(&mut self) {
        let Some(mut other) = self.other.take() else { return };
        let heard = other.hear().map(|heard| self.must_hear |= heard);
        match (heard, other.device.is_running(), self.is_running()) {
            (Ok(()), true, true) => self.end_other(
                &other,
                "a second front end started its device, and was sent away: the node's machine still runs; give each virtual \
                 machine a node of its own"
                    .to_owned(),
            ),
            (Ok(()), true, false) => {
                self.other = self.machine.take();
                self.serve(other);
            }
            (Ok(()), false, _) => self.other = Some(other),
            (Err(refusal), ..) => self.refuse_other(&other, &refusal),
        }
    }

    /// Sends away the front end of the second machine, which was taken out.
    pub(super) fn refuse_other(&mut self, other: &Machine, refusal: &Refusal) {
        if *refusal == Refusal::Left {
            self.hang_up_other(other);
        } else {
            self.end_other(other, format!("the front end of a second machine was sent away: {refusal}"));
        }
    }

    fn end_other(&mut self, other: &Machine, sentence: String) {
        self.hang_up_other(other);
        self.refuse(sentence);
    }

    fn hang_up_other(&mut self, other: &Machine) {
        other.channel.hang_up();
        // Other processes may have the socket: it was served, perhaps.
        self.must_watch = true;
    }

    fn refuse(&mut self, sentence: String) {
        self.clients.refused += 1;
        self.trouble = Some(sentence);
    }

    /// Serves another machine from now on.
    fn serve(&mut self, mut machine: Box<Machine>) {
        machine.device.follow(self.session());
        self.machine = Some(machine);
        // The daemon has not heard of it: as after a message, no frame moves in this turn.
        (self.has_news, self.must_hear, self.heard) = (true, true, true);
        self.must_watch = true;
        self.look_at_all();
    }

    /// Returns the number of the state of the device that is served, or was last.
    fn session(&self) -> u32 {
        self.machine.as_ref().or(self.other.as_ref()).map_or(self.session, |machine| machine.device.session())
    }

    /// Ends the connection of the machine that is served.
    pub(super) fn end(&mut self, refusal: &Refusal) {
        let Some(mut machine) = self.machine.take() else { return };
        // The guest may wait for what the next back end takes for given.
        machine.device.flush();
        machine.device.leave(self.marks.as_ref().filter(|_| *refusal == Refusal::Stale));
        self.has_news = true;
        // A description of this machine does not count any more.
        self.session = machine.device.session().wrapping_add(1);
        if *refusal != Refusal::Left {
            self.refuse(format!("the machine's front end was sent away: {refusal}"));
        }
        machine.channel.hang_up();
        match self.other.take() {
            Some(other) => self.serve(other),
            None => self.must_watch = true,
        }
    }

    /// Ends the connection of a machine of which no newer description has come.
    pub(super) fn end_stale(&mut self) {
        if let Some((mut machine, _)) = self.stale.take_if(|(_, since)| since.elapsed() >= LATE_NEWS) {
            // The mark is of a later state: no number comes twice.
            machine.device.follow(self.session);
            self.machine = Some(machine);
            self.end(&Refusal::Stale);
            self.must_hear = true;
        }
    }

    /// Ends the connections of front ends that have said nothing for too long.
    pub(super) fn end_silent(&mut self, now: Instant) {
        if let Some(refusal) = self.machine.as_ref().and_then(|machine| machine.silence(now)) {
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
        if let Some(Machine { device, .. }) = self.machine.as_deref_mut() {
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
                (self.calm, self.hushed) = (0, 0);
            }
        }
        if self.must_watch {
            self.watch_anew();
        }
    }

    /// Watches the listener, both sockets, and the eventfds that the machine has now, if others may be watched: the front
    /// end may have those open, too. Nobody reads those of the second machine.
    fn watch_anew(&mut self) {
        self.look_at_all();
        let sockets = self.machine.iter().chain(&self.other).map(|machine| machine.channel.socket());
        let kicks = || self.machine.iter().flat_map(|machine| machine.device.numbered_kicks());
        // A kick of before wakes nobody: the rings are looked at next.
        kicks().for_each(|(_, kick)| tasuki_shm::wake::drain(kick));
        // Without a descriptor for that, the next sleep tries again: a tick ends the present one.
        self.must_watch = self.listener.watch_only(sockets.map(AsFd::as_fd), kicks()).is_err();
    }

    /// Goes on with the machine of a predecessor.
    pub(super) fn go_on_now(&mut self, mut machine: Box<Machine>) {
        let mut ours = self.machine.iter().chain(&self.other).map(|ours| ours.channel.number());
        if ours.any(|number| number == machine.channel.number()) {
            return;
        }
        if self.machine.is_some() {
            // It came too late, and nobody else serves it.
            machine.channel.hang_up();
            return;
        }
        // The daemon hears from us when this machine leaves only if it has heard of it from us before.
        self.has_news = true;
        machine.device.journal = self.journal.clone();
        let Machine { channel, device, .. } = &mut *machine;
        channel.take_over();
        let went = device.go_on(self.marks.as_ref(), || channel.has_more());
        if went == Err(Refusal::Stale) {
            self.stale = Some((machine, Instant::now()));
            return;
        }
        self.stale = None;
        let is_amid = went == Ok(true);
        if is_amid {
            machine.set_up = Some(SetUp::new());
        }
        // The first turn is for frames.
        (self.machine, self.must_hear, self.must_ring) = (Some(machine), is_amid, true);
        self.must_watch = true;
        self.look_at_all();
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
        self.machine.as_ref().is_some_and(|machine| machine.waits())
    }

    fn told(&mut self) {
        if let Some(machine) = &mut self.machine {
            machine.is_kept = true;
            if let Err(refusal) = machine.let_go() {
                self.end(&refusal);
            }
        }
    }

    fn parts(&mut self) -> io::Result<Option<Parts>> {
        self.has_news = false;
        let Some(machine) = self.machine.as_ref().or(self.inherited.as_ref()) else { return Ok(None) };
        let fds = [machine.channel.socket()].into_iter().chain(machine.device.fds());
        Ok(Some(Parts {
            name: "a virtual machine".to_owned(),
            number: machine.channel.number(),
            version: machine.device.session().into(),
            text: machine.device.text(),
            fds: fds.map(OwnedFd::try_clone).collect::<io::Result<_>>()?,
        }))
    }

    fn go_on(&mut self, parts: Parts) -> Result<(), String> {
        let Parts { text, mut fds, .. } = parts;
        if fds.is_empty() {
            return Err("no socket came with a virtual machine; rebuild the older of daemon and worker".to_owned());
        }
        let socket = fds.remove(0);
        let channel = Channel::new(socket);
        // A front end that no successor can serve has to connect again.
        let device = Device::again(&text, fds).inspect_err(|_| channel.hang_up())?;
        let machine = Box::new(Machine::again(channel, device));
        if self.serves {
            self.go_on_now(machine);
        } else {
            self.inherited = Some(machine);
        }
        Ok(())
    }

    fn forget(&mut self, number: u64) {
        self.inherited.take_if(|machine| machine.channel.number() == number);
    }

    fn dismiss(&mut self, _: Dismissal) {
        self.other.take().into_iter().for_each(|other| other.channel.hang_up());
        self.end(&Refusal::Left);
    }
}
