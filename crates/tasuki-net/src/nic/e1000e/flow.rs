//! Flow control: the card asks its link partner to pause before its packet buffer is full, and pauses when the
//! partner asks (IEEE 802.3, annexes 28B and 31B; data sheet sections 3.5.5 and 10.2.2).
//!
//! The card does this by itself once it knows the result of the negotiation. The PHY holds that result. The driver
//! reads the PHY and does not write it: our side offers the card's default abilities. Only `left.rs` writes it,
//! after a last owner that has changed it.

use std::time::Duration;

use super::regs::{self, Mmio, ctrl, fcrtl, mdic, phy};
use super::setup::{PBA, within};
use crate::nic::bus::Registers;

/// Longest pause: 65,535 times 512 bits, 33 ms at a gigabit.
pub const PAUSE_MAX: u32 = 0xffff;

/// Remainder of a pause at which the card tells the partner again.
const REFRESH_AT: u32 = PAUSE_MAX / 2;

/// Number of bytes that come while a partner reacts: two quanta, and 200 m of cable (IEEE 802.3, 31B.3.7).
const REACTION_LEN: u32 = 128 + 256;

/// Length in bytes of the check sequence, which occupies the buffer as well.
const CRC_LEN: u32 = 4;

/// Time limit for an access to a register of the PHY: 64 bits at 2.5 MHz, and a bus.
const PHY_LIMIT: Duration = Duration::from_millis(1);

/// Sets the fill levels at which the card asks the partner to pause and to go on. `by_itself` says whether the card
/// may tell it to go on by itself. The card asks nothing of the partner before the two have agreed.
pub fn prepare<R: Registers>(mmio: &Mmio<R>, frame: u16, by_itself: bool) {
    let buffer = PBA << 10;
    // Leave room for a frame of ours that is being sent, and one of the partner's, before it can react. Very long
    // frames leave no room for that: a lone frame on its way to memory must not make the partner pause.
    let whole = u32::from(frame) + CRC_LEN;
    let high = buffer.saturating_sub(2 * whole + REACTION_LEN).max(whole.next_multiple_of(8) + 8) & 0xfff8;
    mmio.write(regs::FCTTV, PAUSE_MAX);
    mmio.write(regs::FCRTV, REFRESH_AT);
    mmio.write(regs::FCRTL, if by_itself { fcrtl::XONE } else { 0 } | (high / 2) & 0xfff8);
    mmio.write(regs::FCRTH, high);
}

/// Keeps the card from asking the partner to pause.
pub fn leave_off<R: Registers>(mmio: &Mmio<R>) {
    [regs::FCRTV, regs::FCRTL, regs::FCRTH].into_iter().for_each(|register| mmio.write(register, 0));
}

/// Returns whether a driver, possibly a predecessor, has enabled flow control on the card.
pub fn is_prepared<R: Registers>(mmio: &Mmio<R>) -> bool {
    mmio.read(regs::FCRTH) != 0
}

/// Sets whether the card may tell the partner to go on by itself.
pub fn go_on_by_itself<R: Registers>(mmio: &Mmio<R>, may: bool) {
    mmio.change(regs::FCRTL, fcrtl::XONE, if may { fcrtl::XONE } else { 0 });
}

/// Sets the card to the flow control that the partners agreed on when the link came up, if the PHY can be read.
pub fn agree<R: Registers>(mmio: &Mmio<R>) {
    let (Some(ours), Some(theirs)) = (read_phy(mmio, phy::ADVERTISED), read_phy(mmio, phy::PARTNER)) else { return };
    let (obeys, asks) = resolve(ours, theirs);
    let bit = |is: bool, bit: u32| if is { bit } else { 0 };
    mmio.change(regs::CTRL, ctrl::RFCE | ctrl::TFCE, bit(obeys, ctrl::RFCE) | bit(asks, ctrl::TFCE));
}

/// Turns flow control off: there are no pauses in half duplex.
pub fn disagree<R: Registers>(mmio: &Mmio<R>) {
    mmio.change(regs::CTRL, ctrl::RFCE | ctrl::TFCE, 0);
}

/// Returns whether we pause for the partner, and whether it pauses for us: IEEE 802.3, table 28B-3.
fn resolve(ours: u16, theirs: u16) -> (bool, bool) {
    let of = |abilities: u16| (abilities & phy::PAUSE != 0, abilities & phy::ASYMMETRIC != 0);
    match (of(ours), of(theirs)) {
        ((true, _), (true, _)) => (true, true),
        ((true, true), (false, true)) => (true, false),
        ((false, true), (true, true)) => (false, true),
        _ => (false, false),
    }
}

/// Returns the value of a register of the PHY, or `None` if it cannot be read.
pub fn read_phy<R: Registers>(mmio: &Mmio<R>, register: u32) -> Option<u16> {
    ask_phy(mmio, mdic::READ | register << mdic::REGISTER_SHIFT)
}

/// Writes a register of a PHY that is being reset.
pub fn write_phy<R: Registers>(mmio: &Mmio<R>, register: u32, value: u16) {
    ask_phy(mmio, mdic::WRITE | register << mdic::REGISTER_SHIFT | u32::from(value));
}

fn ask_phy<R: Registers>(mmio: &Mmio<R>, what: u32) -> Option<u16> {
    mmio.write(regs::MDIC, what | mdic::PHY);
    let mut found = 0;
    let done = within(PHY_LIMIT, || {
        found = mmio.read(regs::MDIC);
        found & mdic::R != 0
    });
    (done && found & mdic::E == 0).then(|| u16::try_from(found & 0xffff).expect("16 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partners_agree_as_the_standard_has_it() {
        const NONE: u16 = 0;
        const BOTH: u16 = phy::PAUSE | phy::ASYMMETRIC;
        for (ours, theirs, agreed) in [
            (NONE, BOTH, (false, false)),
            (BOTH, NONE, (false, false)),
            (phy::PAUSE, phy::PAUSE, (true, true)),
            (phy::PAUSE, BOTH, (true, true)),
            (BOTH, BOTH, (true, true)),
            (BOTH, phy::ASYMMETRIC, (true, false)),
            (phy::ASYMMETRIC, BOTH, (false, true)),
            (phy::ASYMMETRIC, phy::PAUSE, (false, false)),
            (phy::ASYMMETRIC, phy::ASYMMETRIC, (false, false)),
            (phy::PAUSE, phy::ASYMMETRIC, (false, false)),
        ] {
            assert_eq!(resolve(ours, theirs), agreed, "{ours:#x} and {theirs:#x}");
        }
    }
}
