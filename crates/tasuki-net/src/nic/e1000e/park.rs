//! Stopping a card so that it touches no memory, and going on, without a reset and without the PHY.
//!
//! The card loses what comes while its receive side is off, without counting it. So the other end of the wire is asked to pause
//! first (IEEE 802.3 annex 31B), if there is one in full duplex: a partner that honours that sends nothing while the card is parked,
//! for as long as a pause can be, and nothing is lost. One that does not is no worse off.

use std::time::{Duration, Instant};

use super::counters::Counters;
use super::flow::{self, PAUSE_MAX};
use super::regs::{self, Mmio, rctl, status, tctl};
use super::setup::within;
use crate::nic::bus::Registers;
use crate::nic::{Link, NicError};

/// How long the card may take to send what it was given. What is left then stays in its ring.
pub(super) const DRAIN_LIMIT: Duration = Duration::from_millis(5);
/// How long the card may take to send a PAUSE frame, besides the time on the wire.
const XOFF_LIMIT: Duration = Duration::from_micros(200);
/// Bytes of a PAUSE frame, with preamble and gap, and those that a frame has besides its own.
const PAUSE_LEN: u32 = 84;
const AROUND_LEN: u32 = 24;
/// How long the wire may take to fall silent after that. Whoever sends on then does not honour pauses.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_millis(1);
/// How long the card may go on after it was switched off.
pub(super) const STOP_LIMIT: Duration = Duration::from_millis(50);
/// A round trip over the bus, many times over,
const BUS_TIME: Duration = Duration::from_micros(20);
/// and a few times: by then what the card has taken off the wire is in memory.
const BUS_TRIP: Duration = Duration::from_micros(6);

/// What a pause is cut down to when the card goes on, in times of 512 bits: 10 µs at a gigabit. Not none: should the card have to stop the
/// partner at that very moment, because the driver is not run, then with the same time, again and again.
pub(super) const PAUSE_MIN: u32 = 20;

/// What the status register says of the wire.
pub fn link(status: u32) -> Link {
    if status & status::LU == 0 {
        return Link::Down;
    }
    let speed = match status >> status::SPEED_SHIFT & 3 {
        0 => 10,
        1 => 100,
        _ => 1000,
    };
    Link::Up { speed, full_duplex: status & status::FD != 0 }
}

/// How long the card may take to send a PAUSE frame: the frame of `frame` bytes before it, and itself. Bits by Mb/s are microseconds.
pub(super) fn xoff_limit(frame: u16, speed: u32) -> Duration {
    XOFF_LIMIT + Duration::from_micros(u64::from((u32::from(frame) + AROUND_LEN + PAUSE_LEN) * 8 / speed))
}

/// How long nothing must have come until nothing is under way: a frame that had begun to come when the receive side was switched off is still
/// written. Bits by Mb/s are microseconds.
pub(super) fn quiet(frame: u16, speed: u32) -> Duration {
    Duration::from_micros(u64::from(frame) * 8 / u64::from(speed)) + BUS_TIME
}

/// How long nothing must have come, on a card that receives and whose partner pauses, to believe that nothing will: the frame that had begun has arrived. Less than [`quiet`],
/// for senders wait meanwhile, and whoever goes on asks once more.
pub(super) fn silent(frame: u16, speed: u32) -> Duration {
    quiet(frame, speed) - BUS_TIME + BUS_TRIP
}

/// Has the partner pause, or go on.
pub(super) fn pause<R: Registers>(mmio: &Mmio<R>, time: u32) {
    mmio.write(regs::FCTTV, time);
    mmio.change(regs::TCTL, 0, tctl::SWXOFF);
}

/// Whether `heads` stay the same for `time`, and through a few looks at them, asked for at most `limit`.
pub(super) fn settles(limit: Duration, time: Duration, mut heads: impl FnMut() -> [u32; 2]) -> bool {
    const SAME_AT_LEAST: u32 = 4;
    let mut last = heads();
    let mut since = Instant::now();
    let mut same = 0;
    within(limit, || {
        let now = heads();
        same += 1;
        if now != last {
            (last, since, same) = (now, Instant::now(), 0);
        }
        same >= SAME_AT_LEAST && since.elapsed() >= time
    })
}

/// Has the card finish what it has begun. Afterwards it touches no memory.
pub fn stop<R: Registers>(mmio: &Mmio<R>, frame: u16, counters: &mut Counters) -> Result<(), NicError> {
    let status = mmio.read(regs::STATUS);
    if status == u32::MAX {
        return Err(NicError::Gone);
    }
    mmio.write(regs::IMC, u32::MAX);
    let link = link(status);
    let speed = match link {
        Link::Down => 10,
        Link::Up { speed, .. } => speed,
    };
    let quiet = quiet(frame, speed);
    let received = || [mmio.read(regs::RDH.of(0)), mmio.read(regs::RDH.of(1))];
    if let Link::Up { full_duplex, .. } = link {
        if full_duplex {
            // The buffer is about to become empty, and the card must not take that for a reason to let the partner go on.
            flow::go_on_by_itself(mmio, false);
            // What it has sent until now, for want of room, is not what is waited for.
            counters.collect_xoff_sent(mmio);
            pause(mmio, PAUSE_MAX);
            within(xoff_limit(frame, speed), || counters.collect_xoff_sent(mmio) > 0);
        }
        within(DRAIN_LIMIT, || mmio.read(regs::TDH) == mmio.read(regs::TDT));
        if full_duplex {
            settles(SILENCE_LIMIT, quiet, received);
        }
    }
    let stopped = |step, settled| match settled {
        true => Ok(()),
        false => Err(NicError::Stuck { step, limit_ms: u32::try_from(STOP_LIMIT.as_millis()).unwrap_or(u32::MAX) }),
    };
    mmio.change(regs::RCTL, rctl::EN, 0);
    stopped("receiving", settles(STOP_LIMIT, quiet, received))?;
    mmio.change(regs::TCTL, tctl::EN | tctl::SWXOFF, 0);
    stopped("sending", settles(STOP_LIMIT, quiet, || [mmio.read(regs::TDH), 0]))?;
    if mmio.read(regs::STATUS) == u32::MAX { Err(NicError::Gone) } else { Ok(()) }
}

/// Switches a card on again that [`stop`] has stopped. Its partner still pauses.
pub fn go_on<R: Registers>(mmio: &Mmio<R>) {
    mmio.change(regs::TCTL, 0, tctl::EN);
    mmio.change(regs::RCTL, 0, rctl::EN);
}

/// Lets the partner go on. Not before the card's buffer is empty: had the card itself stopped the partner before it was parked, it would
/// not do so again while it believes that the partner is still stopped, and the buffer would overflow.
pub fn let_go<R: Registers>(mmio: &Mmio<R>, frame: u16, counters: &mut Counters) {
    let prepared = flow::is_prepared(mmio);
    match link(mmio.read(regs::STATUS)) {
        Link::Up { full_duplex: true, speed } if prepared => {
            counters.collect_xoff_sent(mmio);
            pause(mmio, PAUSE_MIN);
            // Not before the frame that says so has left: it takes its time from the register.
            within(xoff_limit(frame, speed), || counters.collect_xoff_sent(mmio) > 0);
            mmio.write(regs::FCTTV, PAUSE_MAX);
        }
        Link::Up { full_duplex: true, .. } => pause(mmio, 0),
        // Nobody is there who pauses, and whoever comes next has not been told to.
        Link::Down | Link::Up { .. } => {}
    }
    if prepared {
        flow::go_on_by_itself(mmio, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_frame_may_take_as_long_as_the_frame_before_it() {
        assert_eq!(xoff_limit(1518, 1000), Duration::from_micros(200 + 13));
        assert_eq!(xoff_limit(1518, 10), Duration::from_micros(200 + 1300));
        assert_eq!(xoff_limit(9018, 100), Duration::from_micros(200 + 730));
    }
}
