//! Points a card at another owner's rings (the data sheet's sections 4.6.5, 4.6.6 and 10.2.5 to 10.2.6).
//!
//! Base and head of a ring may be written only while its unit is off. While the receive unit is off, the card loses
//! the frames that come, and does not count them. So the giver first asks the link partner to pause, and goes on
//! until no more frames come. Only then are the units switched off: by the taker, and only for as long as it takes
//! to write where its rings are.
//!
//! Between the two the card runs, however long that is: the giver may be ended, or a daemon may die. The partner's
//! pause is over after 33 ms. Frames that come then go into the giver's ring, or make the card ask for another
//! pause. A taker finds that the head has moved on, and leaves the card to the process that has that ring. A giver
//! whose partner does not pause switches the units off itself.
//!
//! The taker writes eight values: base (two halves), head and tail of the receive ring, and of the transmit ring;
//! four more for a second receive queue. All writes are posted: it is enough that messages arrive in order. Address
//! and data of the MSI-X message stay as they are, and so does the eventfd that it becomes: the taker's twin has the
//! same.
//!
//! While neither drives, the taker waits for only one answer: has the card stopped where its giver was?

use std::time::{Duration, Instant};

use super::counters::Counters;
use super::driver_state::{COUNTERS, QUEUES_MAX};
use super::flow::{self, PAUSE_MAX};
use super::park::{self, DRAIN_LIMIT, PAUSE_MIN, SILENCE_LIMIT, STOP_LIMIT};
use super::regs::{self, Mmio, Reg, rctl, tctl};
use super::ring::{DESCRIPTOR_LEN, ReceiveRing, ReceiveRings, TransmitRing};
use super::setup::{self, LONG_FROM, Shape};
use super::{BAR, DRIVER, E1000e, I82574, IDS, Reached, filter_of, left};
use crate::nic::bus::{Bus, Header, Iova, Registers};
use crate::nic::driver::{Assembly, Driver, Transmit as _};
use crate::nic::driver_state::broken;
use crate::nic::memory::HEAD;
use crate::nic::{Can, Failed, How, Left, Link, MemoryLayout, NicError, NicMemory, NicOptions, Repoint};
use crate::port::Burst;

/// Minimum number of requests to a card before we give up, however long each takes: the process that models a card
/// may have been asleep meanwhile.
const ASKED_AT_LEAST: u32 = 16;
/// Minimum number of looks at a silent card. The taker looks once more.
const LOOKS_AT_LEAST: u32 = 2;

/// Minimum time until a PAUSE frame has left, including the way to the card. Asking sooner is in vain, and delays
/// received frames.
const ASK_AFTER: Duration = Duration::from_micros(4);

/// Progress of a giver.
#[derive(Debug, Clone, Copy, Default)]
pub struct Quiesce {
    /// Set once the partner was asked to pause, or was found to be absent.
    asked: Option<Asked>,
    /// Whether the receive unit is off: no slots are posted.
    off: bool,
    /// How the card was left.
    left: u64,
    /// Number of PAUSE frames that have not left yet: the last of them lets the partner go on.
    unsent: u64,
    /// Time at which we let the partner go on. Set until every setting changed for that is put back.
    let_go_at: Option<Instant>,
}

impl Quiesce {
    #[inline]
    pub fn is_off(self) -> bool {
        self.off
    }

    pub fn let_go_at(self) -> Option<Instant> {
        self.let_go_at
    }
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    at: Instant,
    link: Link,
    /// Former values of the receive and the transmit control register.
    control: [u32; 2],
    /// Whether the partner has been told to pause, or seems absent. `asks` counts the requests to the card since
    /// then, or until then.
    told: bool,
    /// Whether the card has really asked the partner.
    paused: bool,
    asks: u32,
    /// Number of looks for new frames since the last one came.
    looks: u32,
    /// Time at which a frame was last seen to come. `heads` are the positions of the rings then.
    still_since: Instant,
    heads: [u32; QUEUES_MAX],
}

/// Minimum time until the frame that lets the partner go on has left. Asking sooner is in vain, and delays received
/// frames.
const LEAVES_AFTER: Duration = Duration::from_micros(50);

/// The card's second queue cannot be given rings while the first one runs (docs/decisions/0014).
const CAN: Can = Can { point: true, pauses: true, fenced: true, steer: false };

/// A taker with rings of its own: a driver that has everything but the card.
pub struct Ready<B: Bus> {
    nic: E1000e<B>,
    /// Values of the receive and the transmit control register, without the bits that switch the units on. Once we
    /// are ready, the giver changes no other bits.
    controls: [u32; 2],
    /// For a giver that is not trusted: the values that the two registers are to get, from our options. The memory
    /// is not mapped yet.
    fenced: Option<[u32; 2]>,
}

/// Format of the word that says how a card was left: `RUNS` if it runs. `SINCE` is the time in ms at which the
/// partner was asked to pause. The halves of the low word are the heads of the receive rings.
const RUNS: u64 = 1 << 63;
const SINCE: u64 = 0x7fff_ffff << 32;

/// Returns the word for a card that was left running with these heads of its receive rings.
fn runs(heads: [u32; QUEUES_MAX]) -> u64 {
    RUNS | u64::from(heads[0] & 0xffff) | u64::from(heads[1] & 0xffff) << 16
}

/// Returns the time `ago` before now in the format of the word, on the clock that all processes share.
fn since(ago: Duration) -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let ms = now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000;
    ms.wrapping_sub(u64::try_from(ago.as_millis()).unwrap_or(u64::MAX)) << 32 & SINCE
}

/// Returns the time in ms since the partner was asked to pause, by what the giver has left.
fn age(left: Left) -> u64 {
    (since(Duration::ZERO).wrapping_sub(left.0 & SINCE) & SINCE) >> 32
}

/// Length in bytes of the longest frame with RCTL.LPE.
const LONGEST: u16 = 16_384;

/// Time in ms for which a partner is sure to pause after it was asked, at a gigabit: two thirds of the longest
/// pause.
const PAUSED: u64 = 20;

/// Time for which a partner pauses after a taker has begun: all of the longest pause, but for [`HELD_UP`].
const PAUSE: Duration = Duration::from_millis(33 - HELD_UP);

/// Time in ms after which a relay was held up: without that it is over by then.
const HELD_UP: u64 = 2;

impl<B: Bus> std::fmt::Debug for Ready<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ready").finish_non_exhaustive()
    }
}

/// Lets a card that is off go on with these rings. Writes where the rings are, and their owner's positions in them.
/// Then switches both units on, the transmit side first, for two reasons: an answer may follow a frame at once, and
/// a PAUSE frame is to be sent.
///
/// Writes a receive ring's tail last, as drivers do that start a card: QEMU's model drops its waiting frames when a
/// tail is written while the unit is off. Until then the card has the tail of the previous ring. In a full ring that
/// tail is within the posted descriptors, wherever it is. In a ring that begins at that tail, nothing is posted yet.
/// In all other cases the tail is written first.
///
/// Writes the transmit ring's place first, and the low half of the first receive ring's last. So a card whose driver is killed in
/// between has one of the two from each owner, and the next driver of either sees that ([`go_on_halted`](E1000e::go_on_halted)).
fn go_on_with<R: Registers>(
    mmio: &Mmio<R>,
    rings_at: Iova,
    (rx, tx): (&ReceiveRings, &TransmitRing),
    shape: Shape,
    [receive_control, transmit_control]: [u32; 2],
    begins_at_tail: bool,
) {
    let rings = || [(0_usize, 0_u32), (1, 1)].into_iter().take(rx.len()).zip(rx);
    mmio.0.together(|| {
        let (low, high) = shape.ring_at(rings_at, rx.len()).halves();
        mmio.write(regs::TDBAL, low);
        mmio.write(regs::TDBAH, high);
        mmio.write(regs::TDH, tx.head());
        mmio.write(regs::TDT, tx.tail());
        for ((queue, index), its) in rings().rev() {
            let (low, high) = shape.ring_at(rings_at, queue).halves();
            mmio.write(regs::RDBAH.of(index), high);
            mmio.write(regs::RDH.of(index), its.head());
            if !its.is_full() && !begins_at_tail {
                mmio.write(regs::RDT.of(index), its.tail());
            }
            mmio.write(regs::RDBAL.of(index), low);
        }
        mmio.write(regs::TCTL, transmit_control | tctl::EN);
        mmio.write(regs::RCTL, receive_control | rctl::EN);
        for ((_, index), its) in rings().filter(|(_, its)| its.is_full() || begins_at_tail) {
            mmio.write(regs::RDT.of(index), its.tail());
        }
    });
}

/// Asks a partner whose pause may be over to pause again, and waits until it does. The card runs: its head shows
/// frames that come meanwhile.
fn pause_again<R: Registers>(mmio: &Mmio<R>, counters: &mut Counters, frame: u16, transmit_control: u32) {
    counters.collect_xoff_sent(mmio);
    mmio.write(regs::TCTL, transmit_control | tctl::EN | tctl::SWXOFF);
    setup::within(park::xoff_limit(frame, 1000), || counters.collect_xoff_sent(mmio) > 0);
    let heads = || [mmio.read(regs::RDH.of(0)), mmio.read(regs::RDH.of(1))];
    park::settles(SILENCE_LIMIT, park::quiet(frame, 1000), heads);
}

/// Switches off a running card that was left with these heads of its receive rings, if the heads are still there.
/// Otherwise the card runs on.
fn stop_where<R: Registers>(mmio: &Mmio<R>, queues: usize, left: u64, controls: [u32; 2]) -> Result<(), NicError> {
    let left = left & !SINCE;
    let found = mmio.0.together(|| {
        // The partner's pause may be about to end.
        mmio.write(regs::TCTL, controls[1] | tctl::EN | tctl::SWXOFF);
        mmio.write(regs::RCTL, controls[0]);
        heads_of(mmio, queues)
    });
    if found[0] == u32::MAX {
        return Err(NicError::Gone);
    }
    if runs(found) == left {
        return Ok(());
    }
    mmio.write(regs::RCTL, controls[0] | rctl::EN);
    Err(NicError::FramesCame { head: found[0] })
}

/// Returns the card's positions in its receive rings.
fn heads_of<R: Registers>(mmio: &Mmio<R>, queues: usize) -> [u32; QUEUES_MAX] {
    std::array::from_fn(|queue| if queue < queues { mmio.read(regs::RDH.of(u32::from(queue > 0))) } else { 0 })
}

/// Checks that the card was started with rings and frames of these sizes, which stay as they are.
fn check_shape<R: Registers>(mmio: &Mmio<R>, shape: Shape) -> Result<(), NicError> {
    let len = u32::from(shape.ring) * u32::try_from(DESCRIPTOR_LEN).expect("16");
    let of_second = if shape.queues > 1 { len } else { 0 };
    let refuse = |field, value: u16, must| Err(NicError::Options { field, value: value.into(), must });
    let control = mmio.read(regs::RCTL);
    if control == u32::MAX {
        return Err(NicError::Gone);
    }
    let lens = [mmio.read(regs::RDLEN.of(0)), mmio.read(regs::TDLEN)];
    if lens != [len, len] {
        return refuse(
            "ring",
            shape.ring,
            "it must be what the card runs with, for the length of its rings stays as it is",
        );
    }
    if mmio.read(regs::RDLEN.of(1)) != of_second {
        return refuse("queues", shape.queues.into(), "it must be as many as the card runs with");
    }
    let buffer = rctl::buffer(shape.buffer.into()).expect("a shape's buffers are of a length that the card knows");
    match control & rctl::BUFFER == buffer {
        true => Ok(()),
        false => {
            refuse("mtu", shape.mtu, "it must be what the card runs with, for the length of its buffers stays as it is")
        }
    }
}

impl<B: Bus> Ready<B> {
    /// Prepares everything that the card does not notice.
    fn new(mut bus: B, memory: NicMemory, options: &NicOptions, how: How) -> Result<Self, Failed<B>> {
        memory.take_back();
        memory.ledger().clear();
        let asked = Self::ask(&mut bus, &memory, options);
        let mut card = match asked {
            Ok(card) => card,
            Err(error) => return Err(Failed { error, bus, memory }),
        };
        let controls = [card.mmio.read(regs::RCTL), card.mmio.read(regs::TCTL)];
        match how {
            How::Fenced(mac) => {
                (card.filter, *card.mta) = filter_of(&options.filter);
                (card.flow_control, card.mac, card.suspect) = (options.flow_control, mac, true);
                card.rest = memory.hold_rest();
            }
            How::Point | How::Steer => {
                card.mmio.read_block(regs::MTA.of(0), &mut *card.mta);
                card.filter = match controls[0] {
                    control if control & rctl::UPE != 0 => 1,
                    control if control & rctl::MPE != 0 => 2,
                    _ => 0,
                };
                card.flow_control = flow::is_prepared(&card.mmio);
                if let Err(error) = memory.map_anew(&mut bus) {
                    return Err(Failed { error: error.into(), bus, memory });
                }
            }
        }
        memory.ledger().partial(!card.rest.is_empty());
        card.held = card.flow_control;
        let (mut rx, tx) = (ReceiveRing::all_empty(&memory, card.shape), TransmitRing::empty(&memory, card.shape));
        // With a giver that is not trusted, the rings begin at its tail, which it can move until it is fenced.
        for ring in rx.iter_mut().filter(|_| card.rest.is_empty()) {
            ring.begin_at(0, &memory, usize::MAX);
        }
        let fenced = card.suspect.then(|| setup::controls(card.shape, card.filter_bits()));
        // The counts since the last owner's last read will be ours.
        let counts = Counters::resume(&[0; COUNTERS]);
        let nic = Driver::aside(bus, memory, Assembly { card, rx, tx, counts });
        Ok(Ready { nic, controls: [controls[0] & !rctl::EN, controls[1] & !(tctl::EN | tctl::SWXOFF)], fenced })
    }

    fn ask(bus: &mut B, memory: &NicMemory, options: &NicOptions) -> Result<I82574<B>, NicError> {
        let shape = Shape::of(options, &memory.layout())?;
        Header::of(bus, &IDS, DRIVER)?;
        let mmio = Mmio(bus.registers(BAR)?);
        check_shape(&mmio, shape)?;
        let mac = setup::mac(&mmio)?;
        Ok(I82574::new(Reached::of(bus, mmio)?, shape, mac))
    }
}

impl<B: Bus> E1000e<B> {
    /// Lets the card use the longest pause again, and the partner go on by itself, once the frame that lets the
    /// partner go on has left. Asks the card for that at most once.
    #[cold]
    pub(super) fn finish_letting_go(&mut self, since: Instant) {
        let waited = since.elapsed();
        if waited < LEAVES_AFTER {
            return;
        }
        let late = waited > park::xoff_limit(self.card.shape.frame(), 10);
        let sent = self.counts.collect_xoff_sent(&self.card.mmio);
        self.card.quiesce.unsent = self.card.quiesce.unsent.saturating_sub(sent);
        if self.card.quiesce.unsent > 0 && !late {
            return;
        }
        self.card.mmio.write(regs::FCTTV, PAUSE_MAX);
        flow::go_on_by_itself(&self.card.mmio, true);
        (self.card.held, self.card.quiesce.let_go_at) = (false, None);
        self.write_seldom();
    }

    /// Lets a card that a predecessor had halted go on with our rings: it may have been pointed at the rings of a
    /// taker that has ended.
    ///
    /// # Errors
    /// Our memory cannot be mapped again. The card was not touched.
    pub(super) fn go_on_halted(&mut self) -> Result<(), NicError> {
        // The first and the last place that `go_on_with` writes.
        let places = [regs::TDBAL, regs::TDBAH, regs::RDBAL.of(0), regs::RDBAH.of(0)].map(|at| self.card.mmio.read(at));
        let ours = [self.rx.len(), 0].map(|ring| self.card.shape.ring_at(self.memory.rings_at(), ring).halves());
        let [(transmit_low, transmit_high), (receive_low, receive_high)] = ours;
        if places == [transmit_low, transmit_high, receive_low, receive_high] {
            park::go_on(&self.card.mmio);
            return Ok(());
        }
        self.reach_again()?;
        let controls =
            [self.card.mmio.read(regs::RCTL) & !rctl::EN, self.card.mmio.read(regs::TCTL) & !(tctl::EN | tctl::SWXOFF)];
        self.card.mmio.write(regs::RCTL, controls[0]);
        self.card.mmio.write(regs::TCTL, controls[1]);
        let mmio = &self.card.mmio;
        let heads = || [mmio.read(regs::RDH.of(0)), mmio.read(regs::TDH)];
        park::settles(STOP_LIMIT, park::quiet(self.card.shape.frame(), 1000), heads);
        go_on_with(&self.card.mmio, self.memory.rings_at(), (&self.rx, &self.tx), self.card.shape, controls, false);
        Ok(())
    }

    /// Takes over a card from an owner that is not trusted and was fenced. Stops the card, whatever that owner says,
    /// waits until the card has finished what it had begun, and checks that nothing is left that cannot be undone.
    /// Then the card reaches our memory. If the card is refused, the owner's `controls` are written back.
    ///
    /// Each request may take as long as a server needs to wake up, so there are as few as possible. Returns the
    /// tails of the receive rings, if they are within rings of our size.
    fn inherit(&mut self, left: Left, controls: [u32; 2]) -> Result<Option<[u32; QUEUES_MAX]>, NicError> {
        let mmio = &self.card.mmio;
        // A relay that was held up once may be held up again: all of the longest pause begins here. The PAUSE frame goes
        // before all waiting frames, and the transmit unit switches off behind it, a message later. A relay that was not
        // held up has most of its pause before it, and saves that message's time.
        let runs_on = left.0 & RUNS != 0;
        let renews = runs_on && age(left) > HELD_UP;
        self.card.quiesce.unsent = u64::from(renews);
        let pause = controls[1] | if renews { tctl::EN | tctl::SWXOFF } else { 0 };
        let receive_off = [(regs::FCTTV, PAUSE_MAX), (regs::TCTL, pause), (regs::RCTL, controls[0])];
        let [before, status] = mmio.read_around([regs::RCTL.to_be_read(), regs::STATUS], 1, receive_off);
        let mut off = Instant::now();
        if status == u32::MAX {
            return Err(NicError::Gone);
        }
        let [head, tail] = [regs::RDH, regs::RDT].map(|of| [of.of(0), of.of(1)].map(Reg::to_be_read));
        let places = [head[0], head[1], tail[0], tail[1]];
        let [first, second, first_tail, second_tail] = mmio.read_around(places, 0, [(regs::TCTL, controls[1])]);
        if renews {
            off = Instant::now();
        }
        if runs_on {
            let found = runs([first, if self.rx.len() > 1 { second } else { 0 }]);
            let ring = u64::from(self.card.shape.ring);
            let came = |shift: u32| ((found >> shift & 0xffff) + ring - (left.0 >> shift & 0xffff) % ring) % ring;
            self.card.came_too_late = came(0) + came(16);
        }
        let speed = if let Link::Up { speed, .. } = park::link(status) { speed } else { 1000 };
        // Wait until the card has finished: descriptors that it has already read may name addresses that become our
        // memory's. A frame as long as the card accepted may be in transit.
        let longest = if before & rctl::LPE != 0 { LONGEST } else { LONG_FROM };
        let tails = [first_tail, second_tail];
        let are_ours = tails[..self.rx.len()].iter().all(|tail| *tail < self.card.shape.ring.into());
        let tails = are_ours.then_some(tails);
        if self.memory.ledger().is_partial() {
            self.begin_rings(tails.unwrap_or_default());
        }
        let mmio = &self.card.mmio;
        while off.elapsed() < park::quiet(longest, speed) {
            std::hint::spin_loop();
        }
        let judged = left::judge(mmio).and_then(|()| Ok(self.memory.map_head(&mut self.bus)?));
        if judged.is_err() {
            let mmio = &self.card.mmio;
            mmio.write(regs::TCTL, controls[1] | tctl::EN);
            mmio.write(regs::RCTL, controls[0] | rctl::EN);
        }
        judged.map(|()| tails)
    }

    /// Lets empty receive rings begin at these positions, with the slots that the card reaches.
    fn begin_rings(&mut self, at: [u32; QUEUES_MAX]) {
        let each = HEAD as usize / self.rx.len();
        self.rx.iter_mut().zip(at).for_each(|(ring, at)| ring.begin_at(at, &self.memory, each));
        // No turn: no frame was handled.
        self.commit_up_to(at.map(u64::from), 0);
    }

    /// Writes every setting that decides where the card reads and writes. Both units must be off.
    fn begin_anew(&self, keeps_tails: bool) {
        let I82574 { mmio, shape, .. } = &self.card;
        left::quell(mmio);
        match keeps_tails {
            true => setup::receive_but_tails(mmio, *shape, self.memory.rings_at()),
            false => setup::receive(mmio, *shape, self.memory.rings_at()),
        }
        setup::transmit(mmio, *shape, self.memory.rings_at());
        match self.card.flow_control {
            true => flow::prepare(mmio, shape.frame(), false),
            false => flow::leave_off(mmio),
        }
    }

    /// Undoes settings of a former owner that merely make the card misbehave.
    fn put_right(&mut self, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        left::put_right(&self.card.mmio, self.card.mac, &self.card.mta);
        between(self);
        self.bus.renew()?;
        between(self);
        let mut is_sound = true;
        for register in left::PHY {
            is_sound = is_sound && left::is_sound(&self.card.mmio, register);
            between(self);
        }
        if !is_sound {
            left::reset_phy(&self.card.mmio);
        }
        self.card.answers()
    }

    /// Lets the card reach all of its memory. At first it was given only as much as it needs to go on.
    fn have_all(&mut self) -> Result<(), NicError> {
        if self.memory.ledger().is_partial() {
            self.bus.hurry(true);
            let mapped = self.memory.map_rest(&mut self.bus);
            self.bus.hurry(false);
            mapped?;
            self.memory.ledger().partial(false);
            self.card.rest = Vec::new();
        }
        Ok(())
    }

    fn heads(&self) -> [u32; QUEUES_MAX] {
        std::array::from_fn(|queue| self.rx.get(queue).map_or(0, ReceiveRing::head))
    }

    /// Returns whether no frame has come for as long as a frame in transit takes.
    fn is_silent(&self, asked: &Asked, speed: u32) -> bool {
        asked.looks >= LOOKS_AT_LEAST && asked.still_since.elapsed() >= park::silent(self.card.shape.frame(), speed)
    }

    /// Returns whether the partner was told to pause. Asks the card until it was, but not for too long.
    fn is_told(&mut self, asked: &mut Asked) -> bool {
        let Link::Up { full_duplex: true, speed } = asked.link else { return true };
        if !asked.told && asked.at.elapsed() < ASK_AFTER {
            return false;
        }
        asked.asks += 1;
        if !asked.told {
            let late =
                asked.at.elapsed() > park::xoff_limit(self.card.shape.frame(), speed) && asked.asks >= ASKED_AT_LEAST;
            // Count from this request on: the answer describes a moment before it came. The limit allows for a few
            // trips over the bus.
            (asked.still_since, asked.looks) = (Instant::now(), 0);
            asked.paused = self.counts.collect_xoff_sent(&self.card.mmio) > 0;
            asked.told = asked.paused || late;
            if asked.told {
                asked.asks = 0;
            }
        }
        asked.told
    }
}

impl<B: Bus> Repoint for E1000e<B> {
    type Ready = Ready<B>;

    fn prepare_rings(
        bus: B,
        memory: NicMemory,
        options: &NicOptions,
        how: How,
        _: Iova,
    ) -> Result<Ready<B>, Failed<B>> {
        match CAN.go(how) {
            Ok(()) => Ready::new(bus, memory, options, how),
            Err(error) => Err(Failed { error, bus, memory }),
        }
    }

    fn can(&self) -> Can {
        CAN
    }

    fn give_up(ready: Ready<B>) -> (B, NicMemory) {
        ready.nic.surrender()
    }

    fn quiesce(&mut self, _: How, mut between: impl FnMut(&mut Self)) {
        self.memory.ledger().halted(true);
        // A partner that still pauses need not be let go on any more.
        self.card.held = false;
        let link = match self.card.mmio.read(regs::STATUS) {
            u32::MAX => Link::Down,
            status => park::link(status),
        };
        between(self);
        let receive = self.card.mmio.read(regs::RCTL);
        between(self);
        let control = [receive, self.card.mmio.read(regs::TCTL)];
        between(self);
        if let Link::Up { full_duplex: true, .. } = link {
            // The buffer is about to become empty. The card must not let the partner go on because of that.
            flow::go_on_by_itself(&self.card.mmio, false);
            between(self);
            // Discard the count of PAUSE frames that the card has sent until now, for want of room: we wait for a
            // new one.
            self.counts.collect_xoff_sent(&self.card.mmio);
            self.card.mmio.write(regs::FCTTV, PAUSE_MAX);
            self.card.mmio.write(regs::TCTL, control[1] | tctl::SWXOFF);
        }
        let now = Instant::now();
        let heads = self.heads();
        let asked =
            Asked { at: now, link, control, told: false, paused: false, asks: 0, looks: 0, still_since: now, heads };
        self.card.quiesce = Quiesce { asked: Some(asked), ..Quiesce::default() };
    }

    fn is_quiet(&mut self) -> bool {
        let Some(mut asked) = self.card.quiesce.asked else { return false };
        let _ = self.tx.reap(self.memory.arena());
        let told = self.is_told(&mut asked);
        let queues = (0_u32..).zip(&self.rx);
        let still = told
            && self.heads() == asked.heads
            && queues.into_iter().all(|(queue, ring)| self.card.mmio.read(regs::RDH.of(queue)) == ring.head());
        match still {
            true => asked.looks += 1,
            false => (asked.heads, asked.still_since, asked.looks) = (self.heads(), Instant::now(), 0),
        }
        self.card.quiesce.asked = Some(asked);
        let Link::Up { speed, .. } = asked.link else { return true };
        let frame = self.card.shape.frame();
        let silent = self.is_silent(&asked, speed);
        let since = asked.at.elapsed();
        let gone = self.tx.is_empty() || since > DRAIN_LIMIT;
        told && gone
            && (silent || since > park::xoff_limit(frame, speed) + SILENCE_LIMIT && asked.asks >= ASKED_AT_LEAST)
    }

    fn leave(&mut self) -> Result<bool, NicError> {
        let Some(asked) = self.card.quiesce.asked else {
            return Err(broken("it was not quiesced before it was to be left", 0));
        };
        let Asked { link, control: [receive, transmit], .. } = asked;
        if !self.card.quiesce.off {
            self.commit(&Burst::new());
            if let Link::Up { speed, full_duplex: true } = link
                && asked.paused
                && self.is_silent(&asked, speed)
                && self.tx.is_empty()
            {
                self.card.quiesce.left = runs(self.heads()) | since(asked.at.elapsed());
                return Ok(true);
            }
        }
        let queues = self.rx.len();
        let mmio = &self.card.mmio;
        let heads = || heads_of(mmio, queues);
        let was_off = std::mem::replace(&mut self.card.quiesce.off, true);
        let mut found: [u32; QUEUES_MAX] = mmio.0.together(|| {
            if !was_off {
                mmio.write(regs::RCTL, receive & !rctl::EN);
            }
            heads()
        });
        if found[0] == u32::MAX {
            return Err(NicError::Gone);
        }
        if found != self.heads() {
            // A frame came at the last moment. Let the card finish it, and have the caller handle it.
            let speed = if let Link::Up { speed, .. } = link { speed } else { 10 };
            if !park::settles(STOP_LIMIT, park::quiet(self.card.shape.frame(), speed), heads) {
                return Err(NicError::Stuck {
                    step: "receiving",
                    limit_ms: u32::try_from(STOP_LIMIT.as_millis()).unwrap_or(u32::MAX),
                });
            }
            found = heads();
            if found != self.heads() {
                return Ok(false);
            }
        }
        mmio.write(regs::TCTL, transmit & !(tctl::EN | tctl::SWXOFF));
        if !self.tx.is_empty() {
            // The partner has us pause, or there is none. Let the card finish the frame that it had begun. The other
            // frames are lost with the memory, unless the card comes back.
            park::settles(STOP_LIMIT, park::quiet(self.card.shape.frame(), 10), || [mmio.read(regs::TDH), 0]);
        }
        self.card.quiesce.left = Left::STOPPED.0;
        Ok(true)
    }

    fn left(&self) -> Left {
        Left(self.card.quiesce.left)
    }

    fn go_back(&mut self) -> Result<(), NicError> {
        if self.card.quiesce.asked.is_none() {
            return Ok(());
        }
        if self.card.quiesce.off || self.card.quiesce.left != 0 {
            // A taker that had already pointed the card elsewhere has ended by now.
            self.go_on_halted()?;
        }
        self.card.quiesce = Quiesce::default();
        self.card.held = true;
        self.write_seldom();
        self.memory.ledger().halted(false);
        self.card.answers()
    }

    fn came_too_late(&self) -> u64 {
        self.card.came_too_late
    }

    fn was_held_up(&self) -> Option<Duration> {
        self.card.held_up
    }

    fn repoint(ready: Ready<B>, left: Left) -> Result<Self, Failed<B>> {
        let Ready { mut nic, controls, fenced } = ready;
        let begun = Instant::now();
        nic.bus.hurry(true);
        let stopped = match left.0 & RUNS {
            _ if fenced.is_some() => nic.inherit(left, controls),
            // The giver switches the transmit side off last: if that is off, the receive side is, too.
            0 => match nic.card.mmio.read(regs::TCTL) {
                u32::MAX => Err(NicError::Gone),
                control if control & tctl::EN != 0 => Err(broken("the card sends, though stopped", control.into())),
                _ => Ok(None),
            },
            _ => {
                let is_old = age(left) > PAUSED;
                let frame = nic.card.shape.frame();
                if is_old {
                    pause_again(&nic.card.mmio, &mut nic.counts, frame, controls[1]);
                }
                let found = heads_of(&nic.card.mmio, if is_old { nic.rx.len() } else { 0 });
                match !is_old || runs(found) == left.0 & !SINCE {
                    true => stop_where(&nic.card.mmio, nic.rx.len(), left.0, controls).map(|()| None),
                    false => Err(NicError::FramesCame { head: found[0] }),
                }
            }
        };
        nic.bus.hurry(false);
        let tails = match stopped {
            Ok(tails) => tails,
            Err(error) => return Err(nic.failed(error)),
        };
        let controls = fenced.unwrap_or(controls);
        // If we die in the middle of this, the next driver lets the card go on, or points it elsewhere.
        nic.memory.ledger().halted(true);
        nic.sign_ledger();
        // The giver has received all frames that had come, so the partner can go on. SWXOFF with a short pause makes
        // the card tell it so by itself, with the next frame that it sends.
        let go_on = [controls[0], controls[1] | tctl::SWXOFF];
        nic.card.mmio.0.together(|| {
            nic.card.mmio.write(regs::TCTL, controls[1]);
            if fenced.is_some() {
                nic.begin_anew(tails.is_some());
            }
            nic.card.mmio.write(regs::FCTTV, if nic.card.flow_control { PAUSE_MIN } else { 0 });
            let begins_at_tail = tails.is_some() && nic.memory.ledger().is_partial();
            let rings_at = nic.memory.rings_at();
            go_on_with(&nic.card.mmio, rings_at, (&nic.rx, &nic.tx), nic.card.shape, go_on, begins_at_tail);
            if fenced.is_some() && nic.rx.len() < QUEUES_MAX {
                nic.card.mmio.write(regs::RDT.of(1), 0);
            }
        });
        nic.card.held_up = Some(begun.elapsed()).filter(|took| left.0 & RUNS != 0 && *took > PAUSE);
        nic.memory.ledger().halted(false);
        nic.card.quiesce.let_go_at = nic.card.flow_control.then(Instant::now);
        // Such a giver's card was asked by `inherit`, if at all; any other that runs, by `stop_where`.
        nic.card.quiesce.unsent += if left.0 & RUNS == 0 || fenced.is_some() { 1 } else { 2 };
        Ok(nic)
    }

    fn forget(&mut self, old: &MemoryLayout, mut between: impl FnMut(&mut Self)) -> Result<(), NicError> {
        // Do all three steps, even if one fails.
        let all = self.have_all();
        between(self);
        let right = if std::mem::take(&mut self.card.suspect) { self.put_right(&mut between) } else { Ok(()) };
        let unmapped = self.unmap_old(old, between);
        all.and(right).and(unmapped)
    }
}
