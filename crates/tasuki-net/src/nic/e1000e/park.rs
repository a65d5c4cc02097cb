//! Stops a card so that it touches no memory, and lets it go on, without a reset and without touching the PHY.
//!
//! The card loses the frames that come while its receive side is off, without counting them. So, on a full-duplex
//! link, the driver asks the link partner to pause first (IEEE 802.3 annex 31B). A partner that honours that sends
//! nothing while the card is parked, for as long as a pause can be, and no frame is lost. A partner that does not is
//! no worse off.

use std::time::{Duration, Instant};

use super::counters::Counters;
use super::flow::{self, PAUSE_MAX};
use super::regs::{self, Mmio, rctl, status, tctl};
use super::setup::within;
use crate::nic::bus::Registers;
use crate::nic::{Link, NicError};

/// Time limit for the card to send the frames it was given. Frames left over then stay in its ring.
pub(super) const DRAIN_LIMIT: Duration = Duration::from_millis(5);
/// Time limit for the card to send a PAUSE frame, besides the time on the wire.
const XOFF_LIMIT: Duration = Duration::from_micros(200);
/// Length in bytes of a PAUSE frame with preamble and gap. `AROUND_LEN` is the number of bytes on the wire that a
/// frame has besides its own.
const PAUSE_LEN: u32 = 84;
const AROUND_LEN: u32 = 24;
/// Time limit for the wire to fall silent after that. A partner that sends for longer does not honour pauses.
pub(super) const SILENCE_LIMIT: Duration = Duration::from_millis(1);
/// Time limit for the card to stop after it was switched off.
pub(super) const STOP_LIMIT: Duration = Duration::from_millis(50);
/// Allowance of many round trips over the bus.
const BUS_TIME: Duration = Duration::from_micros(20);
/// Allowance of a few round trips over the bus: after it, the frames that the card has taken off the wire are in
/// memory.
const BUS_TRIP: Duration = Duration::from_micros(6);

/// Shortened pause when the card goes on, in units of 512 bit times: 10 µs at a gigabit. It is not zero because the
/// card may have to stop the partner at that very moment, if the driver does not run. The card would then use the
/// same time, again and again.
pub(super) const PAUSE_MIN: u32 = 20;

/// Returns the state of the link from the status register.
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

/// Returns the time limit for the card to send a PAUSE frame: the time for a frame of `frame` bytes before it, and
/// for the PAUSE frame. Bits divided by Mb/s are microseconds.
pub(super) fn xoff_limit(frame: u16, speed: u32) -> Duration {
    XOFF_LIMIT + Duration::from_micros(u64::from((u32::from(frame) + AROUND_LEN + PAUSE_LEN) * 8 / speed))
}

/// Returns how long no frame must have come until none is in transit: a frame that had begun to come when the
/// receive side was switched off is still written. Bits divided by Mb/s are microseconds.
pub(super) fn quiet(frame: u16, speed: u32) -> Duration {
    Duration::from_micros(u64::from(frame) * 8 / u64::from(speed)) + BUS_TIME
}

/// Returns how long no frame must have come, on a card that receives and whose partner pauses, until we assume that
/// none will: the frame that had begun has arrived. It is shorter than [`quiet`], since senders wait meanwhile, and
/// the taker asks once more.
pub(super) fn silent(frame: u16, speed: u32) -> Duration {
    quiet(frame, speed) - BUS_TIME + BUS_TRIP
}

/// Has the partner pause for `time`, or go on (0).
pub(super) fn pause<R: Registers>(mmio: &Mmio<R>, time: u32) {
    mmio.write(regs::FCTTV, time);
    mmio.change(regs::TCTL, 0, tctl::SWXOFF);
}

/// Waits up to `limit` until `heads` stay the same for `time`, and over a few looks at them. Returns whether they
/// did.
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

/// Lets the card finish what it has begun. Afterwards it touches no memory.
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
            // The buffer is about to become empty. The card must not let the partner go on because of that.
            flow::go_on_by_itself(mmio, false);
            // Discard the count of PAUSE frames that the card has sent until now, for want of room: we wait for a
            // new one.
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

/// Lets the partner go on. Call it only once the card's buffer is empty. If the card itself had stopped the partner
/// before it was parked, it would not do so again while it believes that the partner is still stopped, and the
/// buffer would overflow.
pub fn let_go<R: Registers>(mmio: &Mmio<R>, frame: u16, counters: &mut Counters) {
    let prepared = flow::is_prepared(mmio);
    match link(mmio.read(regs::STATUS)) {
        Link::Up { full_duplex: true, speed } if prepared => {
            counters.collect_xoff_sent(mmio);
            pause(mmio, PAUSE_MIN);
            // Wait until the PAUSE frame has left: it takes its time from the register.
            within(xoff_limit(frame, speed), || counters.collect_xoff_sent(mmio) > 0);
            mmio.write(regs::FCTTV, PAUSE_MAX);
        }
        Link::Up { full_duplex: true, .. } => pause(mmio, 0),
        // No partner pauses, and the next one has not been told to.
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
