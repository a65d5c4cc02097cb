//! Settings that an untrusted last owner can have left in a card whose link stays up. The table lists each group of
//! registers of the data sheet's chapter 10, and the remedy. docs/design/nic.md has the same table.
//!
//! Registers that decide where the card reads and writes memory are written anew while both units are off, after
//! that owner was fenced and before our memory is mapped. Registers that merely make the card misbehave are put
//! right once frames flow again. Registers that allow neither are checked; a wrong value makes the card go `cold`.

use std::fmt;
use std::time::Duration;

use super::driver_state::MTA_WORDS;
use super::regs::{self, Mmio, ctrl, phy};
use super::{flow, setup};
use crate::nic::bus::Registers;
use crate::nic::{Mac, NicError};

/// Remedy for registers that a last owner can have written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Done {
    /// The value is written before the card may reach our memory.
    Before(u32),
    /// Written before that, too, with values for our rings and options ([`setup`], [`flow`]).
    SetUp,
    /// Read before that; an odd value makes the card go cold.
    Judged,
    /// The value is written once frames flow.
    After(u32),
    /// Put right once frames flow, by a step of their own.
    PutRight,
    /// No remedy, for this reason.
    Nothing(&'static str),
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Done::Before(value) => write!(f, "before: {value:#x}"),
            Done::SetUp => f.write_str("before: as set up"),
            Done::Judged => f.write_str("judged"),
            Done::After(value) => write!(f, "after: {value:#x}"),
            Done::PutRight => f.write_str("after: put right"),
            Done::Nothing(because) => write!(f, "nothing: {because}"),
        }
    }
}

/// Registers at equal distances, the harm that they can do, and the remedy.
#[derive(Debug)]
#[cfg_attr(not(test), expect(dead_code, reason = "names and harm are for the page that has the table"))]
pub struct Row {
    pub name: &'static str,
    pub first: u32,
    pub count: u32,
    pub stride: u32,
    pub harm: &'static str,
    pub done: Done,
}

const fn one(name: &'static str, first: u32, harm: &'static str, done: Done) -> Row {
    Row { name, first, count: 1, stride: 4, harm, done }
}

const fn row(name: &'static str, [first, count, stride]: [u32; 3], harm: &'static str, done: Done) -> Row {
    Row { name, first, count, stride, harm, done }
}

use Done::{After, Before, Judged, Nothing, PutRight, SetUp};

const NVM: &str = "it outlasts every reset; a known hole";
const NO_RESET: &str = "in force after a reset or a negotiation only";
const OFF_IN_RCTL: &str = "RCTL, which is written, has it off";
const OFF_IN_WUFC: &str = "WUFC, which is written, has it off";
const UNUSED: &str = "we use none of it, and it reaches no memory";

/// All groups of registers that a driver can write.
#[rustfmt::skip]
pub const TABLE: &[Row] = &[
    one("CTRL", 0x0000, "no DMA, a forced link, VLAN tags taken off", PutRight),
    one("CTRL, again", 0x0004, "the same", PutRight),
    one("STATUS", 0x0008, "none but PHYRA", Nothing(UNUSED)),
    one("EECD, EERD", 0x0010, "another NVM", Nothing(NVM)),
    one("EERD", 0x0014, "none: it reads", Nothing(UNUSED)),
    one("CTRL_EXT", 0x0018, "interrupt masks that change by themselves", PutRight),
    one("FLA", 0x001c, "another boot ROM", Nothing(NVM)),
    one("MDIC, and the PHY", 0x0020, "loopback, power down, a forced speed", PutRight),
    one("FCAL", 0x0028, "frames taken for PAUSE, and PAUSE for frames", Before(0x00c2_8001)),
    one("FCAH", 0x002c, "the same", Before(0x0000_0100)),
    one("FCT", 0x0030, "the same", Before(0x0000_8808)),
    one("VET", 0x0038, "other tags", After(0x0000_8100)),
    one("ICR, ICS", 0x00c0, "a cause that nobody has", Nothing("each look at the rings clears it")),
    one("ITR", 0x00c4, "late interrupts", After(0)),
    one("ICS", 0x00c8, "see ICR", Nothing("each look at the rings clears it")),
    one("IMS", 0x00d0, "interrupts for nothing", Nothing("IMC, which is written, clears it")),
    one("IMC", 0x00d8, "no interrupts", Before(u32::MAX)),
    one("EIAC", 0x00dc, "interrupts for ever", Before(regs::cause::RXQ)),
    one("IAM", 0x00e0, "interrupts that mask others", Before(0)),
    one("IVAR", 0x00e4, "interrupts elsewhere", Before(regs::ivar::RXQ_TO_0)),
    row("EITR", [0x00e8, 5, 4], "late interrupts", Before(0)),
    one("RCTL", 0x0100, "other buffers, header split, loopback, bad frames, no filter", SetUp),
    one("FCTTV", 0x0170, "a partner that pauses for ever", SetUp),
    one("TCTL", 0x0400, "frames without padding, a slow wire", SetUp),
    one("TCTL_EXT", 0x0404, "late collisions", Nothing("half duplex only")),
    one("TIPG", 0x0410, "a slow wire", SetUp),
    one("AIT", 0x0458, "a slow wire", After(0)),
    one("LEDCTL", 0x0e00, "lights", Nothing("nobody is harmed by a light")),
    one("EXTCNF_CTRL", 0x0f00, "who has the PHY", Nothing(UNUSED)),
    one("EXTCNF_SIZE", 0x0f08, "the PHY, from the NVM", Nothing(NO_RESET)),
    one("PHY_CTRL", 0x0f10, "a slow link", Nothing(NO_RESET)),
    one("PBA", 0x1000, "a packet buffer without room", Judged),
    one("PBS", 0x1008, "the same", Nothing(NO_RESET)),
    one("EEMNGCTL, FLASH", 0x1010, "another NVM", Nothing(NVM)),
    one("FLASHT, EEWR", 0x1028, "another NVM", Nothing(NVM)),
    one("EEWR", 0x102c, "another NVM", Nothing(NVM)),
    row("FLSWCTL, FLSWDATA, FLSWCNT, FLOP", [0x1030, 4, 4], "another NVM", Nothing(NVM)),
    one("ERT", 0x2008, "early interrupts", After(0)),
    one("FCRTL", 0x2160, "a partner that is never let go", SetUp),
    one("FCRTH", 0x2168, "a partner that always pauses, or never", SetUp),
    one("PSRCTL", 0x2170, "buffers of other lengths", Nothing(OFF_IN_RCTL)),
    row("RDFH, RDFT, RDFHS, RDFTS, RDFPC", [0x2410, 5, 8], "frames out of what was in the packet buffer", Nothing("that is the last owner's own")),
    row("RDBAL0, RDBAH0, RDLEN0", [0x2800, 3, 4], "frames written elsewhere", SetUp),
    row("RDH0, RDT0", [0x2810, 2, 8], "the same", SetUp),
    one("RDTR", 0x2820, "late interrupts", Before(0)),
    one("RXDCTL0", 0x2828, "descriptors written back late", SetUp),
    one("RADV", 0x282c, "late interrupts", Before(0)),
    row("RDBAL1, RDBAH1, RDLEN1", [0x2900, 3, 4], "frames written elsewhere, by a queue that we do not know", SetUp),
    row("RDH1, RDT1", [0x2910, 2, 8], "the same", SetUp),
    one("RXDCTL1", 0x2928, "the same", SetUp),
    one("RSRPD", 0x2c00, "interrupts for nothing", After(0)),
    one("RAID", 0x2c08, "the same", After(0)),
    row("TDFH, TDFT, TDFHS, TDFTS, TDFPC", [0x3410, 5, 8], "a packet without an end, which our first frame would become a part of", Judged),
    row("TDBAL0, TDBAH0, TDLEN0", [0x3800, 3, 4], "frames read elsewhere", SetUp),
    row("TDH0, TDT0", [0x3810, 2, 8], "the same", SetUp),
    one("TIDV", 0x3820, "late interrupts", Before(0)),
    one("TXDCTL0", 0x3828, "descriptors read late", SetUp),
    one("TADV", 0x382c, "late interrupts", Before(0)),
    one("TARC0", 0x3840, "nothing is sent", SetUp),
    row("TDBAL1, TDBAH1, TDLEN1", [0x3900, 3, 4], "our memory sent, by a queue that we do not know", Before(0)),
    row("TDH1, TDT1", [0x3910, 2, 8], "the same", Before(0)),
    one("TXDCTL1", 0x3928, "the same", Before(regs::dctl::TX_RESERVED_ONE)),
    // Its count, without its ENABLE.
    one("TARC1", 0x3940, "the same", Before(0x0000_0003)),
    row("statistics", [0x4000, 74, 4], "wrong counts", Nothing("reading clears them, and they only count")),
    one("RXCSUM", 0x5000, "other descriptors", SetUp),
    one("RFCTL", 0x5008, "other descriptors", SetUp),
    row("MAVTV", [0x5010, 4, 4], "frames for the management", Nothing("they reach no memory; see MANC")),
    row("MTA", [0x5200, 128, 4], "frames that nobody asked for", PutRight),
    row("RAL, RAH", [0x5400, 32, 4], "the same, or another station's", PutRight),
    row("VFTA", [0x5600, 128, 4], "the same", Nothing(OFF_IN_RCTL)),
    one("WUC", 0x5800, "a card that goes to sleep", After(0)),
    one("WUFC", 0x5808, "the same", After(0)),
    one("WUS", 0x5810, "the same", Nothing("it only tells")),
    one("MRQC", 0x5818, "frames to a queue that we do not know", SetUp),
    one("MANC", 0x5820, "frames for the management", Nothing("a board with a management controller needs it; a known hole")),
    one("IPAV", 0x5838, "wake-ups", Nothing(OFF_IN_WUFC)),
    row("IP4AT, IP6AT, WUPL", [0x5840, 49, 4], "wake-ups", Nothing(OFF_IN_WUFC)),
    row("WUPM", [0x5a00, 32, 4], "wake-ups", Nothing(OFF_IN_WUFC)),
    one("GCR", 0x5b00, "lost completions", PutRight),
    row("GSCL, GSCN, FACTPS", [0x5b08, 12, 4], "wrong counts", Nothing("they only count")),
    row("SWSM, FWSM", [0x5b50, 2, 4], "a semaphore that is never given back", Nothing(UNUSED)),
    one("SW_FW_SYNC", 0x5b5c, "the same", Nothing(UNUSED)),
    one("GCR2", 0x5b64, "lost completions", PutRight),
    one("PBACL", 0x5b68, "a pending interrupt", PutRight),
    row("RETA", [0x5c00, 32, 4], "frames to a queue that we do not know", SetUp),
    row("RSSRK", [0x5c80, 10, 4], "the same", SetUp),
    row("FFLT", [0x5f00, 11, 4], "wake-ups", Nothing(OFF_IN_WUFC)),
    one("FCRTV", 0x5f40, "a partner whose pause is not renewed", SetUp),
    row("FFMT, FTFT, FFVT", [0x9000, 1024, 4], "wake-ups", Nothing(OFF_IN_WUFC)),
    row("TSYNC, SYSTIM, TIMINCA, …", [0xb600, 16, 4], "another clock", Nothing(UNUSED)),
    row("PBM", [0x1_0000, 16384, 4], "other frames", Nothing("what lies in the packet buffer is the last owner's own")),
];

impl Row {
    fn offsets(&self) -> impl Iterator<Item = u32> + use<> {
        let (first, stride) = (self.first, self.stride);
        (0..self.count).map(move |index| first + index * stride)
    }
}

/// Checks that no setting is left that cannot be undone. Both units must have been off for as long as the card may
/// need to finish what it had begun.
pub fn judge<R: Registers>(mmio: &Mmio<R>) -> Result<(), NicError> {
    let left = |what, value| Err(NicError::LeftBehind { what, value });
    let [head, tail, share] = mmio.read_each([regs::TDFH, regs::TDFT, regs::PBA.to_be_read()]);
    if head != tail {
        return left("a packet without an end", tail.into());
    }
    match share {
        // A last owner may have written this value, where a card keeps it.
        u32::MAX if mmio.read(regs::STATUS) == u32::MAX => Err(NicError::Gone),
        share if share & 0xffff == setup::PBA => Ok(()),
        other => left("another packet buffer", other.into()),
    }
}

/// Writes the registers that decide where the card reads and writes, except those for our rings. Both units must be
/// off.
pub fn quell<R: Registers>(mmio: &Mmio<R>) {
    write(mmio, |done| if let Before(value) = done { Some(value) } else { None });
}

/// Writes the same registers of a card that was reset, and those that merely make it misbehave: we trust no reset to
/// do it.
pub fn begin_anew<R: Registers>(mmio: &Mmio<R>) {
    mmio.0.together(|| {
        quell(mmio);
        write(mmio, |done| if let After(value) = done { Some(value) } else { None });
        forget_addresses(mmio);
    });
}

/// Removes all addresses that the card accepts besides its own.
fn forget_addresses<R: Registers>(mmio: &Mmio<R>) {
    for index in 1..16 {
        mmio.write(regs::RAL.of(index), 0);
        mmio.write(regs::RAH.of(index), 0);
    }
}

fn write<R: Registers>(mmio: &Mmio<R>, which: impl Fn(Done) -> Option<u32>) {
    for row in TABLE {
        if let Some(value) = which(row.done) {
            row.offsets().for_each(|offset| mmio.0.write32(offset, value));
        }
    }
}

/// Writes the registers that merely make the card misbehave. Frames flow meanwhile.
pub fn put_right<R: Registers>(mmio: &Mmio<R>, Mac(mac): Mac, multicast: &[u32; MTA_WORDS]) {
    mmio.0.together(|| {
        write(mmio, |done| if let After(value) = done { Some(value) } else { None });
        let [a, b, c, d, e, f] = mac;
        mmio.write(regs::RAL.of(0), u32::from_le_bytes([a, b, c, d]));
        mmio.write(regs::RAH.of(0), u32::from_le_bytes([e, f, 0, 0x80]));
        forget_addresses(mmio);
        (0..).zip(multicast).for_each(|(index, word)| mmio.write(regs::MTA.of(index), *word));
    });
    setup::general(mmio);
}

/// Checked registers of the PHY: the register, the bits that are checked, and their required value.
pub const PHY: [(u32, u16, u16); 3] = [
    (phy::PAGE, u16::MAX, 0),
    (phy::CONTROL, phy::CONTROL_SOUND, phy::CONTROL_NEGOTIATES),
    (phy::ADVERTISED, phy::OFFERS, phy::OFFERS),
];

/// Returns whether a register of the PHY is as after a reset, in the bits that matter.
pub fn is_sound<R: Registers>(mmio: &Mmio<R>, (register, bits, must): (u32, u16, u16)) -> bool {
    // A management controller may have been at the PHY: then the access fails, and the next one does not.
    let found = (0..3).find_map(|_| flow::read_phy(mmio, register));
    found.is_some_and(|found| found & bits == must)
}

/// Time for which the PHY is held in reset: the maker's drivers wait as long.
const PHY_RESET: Duration = Duration::from_micros(100);

/// Resets the PHY: the link goes down, and comes up again with the PHY's default settings.
#[cold]
pub fn reset_phy<R: Registers>(mmio: &Mmio<R>) {
    mmio.change(regs::CTRL, 0, ctrl::PHY_RST);
    setup::within(PHY_RESET, || false);
    mmio.change(regs::CTRL, ctrl::PHY_RST, 0);
    // QEMU's PHY does not reset by that bit. It does not hold back what is offered to the partner.
    flow::write_phy(mmio, phy::PAGE, 0);
    flow::write_phy(mmio, phy::CONTROL, phy::CONTROL_RESET);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tasuki_sim::e1000e::{Bar, Device, Options};
    use tasuki_sim::journal::Class;
    use tasuki_sim::model::Model as _;

    use super::*;

    #[test]
    fn no_register_has_two_rows() {
        let mut seen = BTreeSet::new();
        for row in TABLE {
            for offset in row.offsets() {
                assert!(seen.insert(offset), "{} at {offset:#x}", row.name);
            }
        }
    }

    /// The table must have every register of the model.
    #[test]
    fn every_register_has_a_row() {
        let mut model = Device::new(Options::default());
        model.write_config(4, 2, 6, 0);
        let ours: BTreeSet<u32> = TABLE.iter().flat_map(Row::offsets).collect();
        for offset in (0..128 << 10).step_by(4) {
            let before = model.journal.count(Class::UnknownRegister);
            model.read(Bar::Registers, offset, 4, 1 << 30);
            let has = model.journal.count(Class::UnknownRegister) == before;
            assert!(!has || ours.contains(&offset), "nothing is said of {offset:#x}");
        }
    }

    /// The page must have the rows of this table.
    #[test]
    fn the_page_has_the_table() {
        let page = include_str!("../../../../../docs/design/nic.md");
        let (_, rest) = page.split_once("<!-- left in an 82574L -->\n").expect("a mark");
        let (_, rest) = rest.split_once("|---|---|---|---|\n").expect("a head");
        let rows: Vec<&str> = rest.lines().take_while(|line| line.starts_with('|')).collect();
        let said = |row: &Row| {
            let last = row.first + (row.count - 1) * row.stride;
            let at = if row.count == 1 {
                format!("{:#06x}", row.first)
            } else {
                format!("{:#06x} to {last:#06x}", row.first)
            };
            format!("| {} | {at} | {} | {} |", row.name, row.harm, row.done)
        };
        let ours: Vec<String> = TABLE.iter().map(said).collect();
        assert_eq!(ours.join("\n"), rows.join("\n"));
    }
}
