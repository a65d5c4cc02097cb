//! Sets up a card from any state until it is ready: the data sheet's chapter 4.6.

use std::time::Duration;

use super::driver_state::{QUEUES_MAX, rings_len};
use super::regs::{self, Mmio, ctrl, ctrl_ext, dctl, eecd, gcr, mrqc, rah, rctl, rfctl, rxcsum, status, tarc, tctl};
use super::ring::{DESCRIPTOR_LEN, RING_MAX, RING_MIN};
use crate::nic::bus::{Iova, Registers};
use crate::nic::register::Waiting;
use crate::nic::{AROUND_PAYLOAD, MTU_MIN, Mac, MemoryLayout, NicError, NicOptions};

/// Maximum payload in bytes for the card's packet buffer.
const MTU_MAX: u16 = 9000;
/// Length in bytes, with check sequence, above which the card accepts frames only if told to.
pub const LONG_FROM: u16 = 1522;

/// Time limit for steps for which the data sheet gives no time. The maker's drivers wait 10 to 100 ms.
const RESET_LIMIT: Duration = Duration::from_millis(100);

/// Time without any access after CTRL.RST. The data sheet wants 1 µs (10.2.2.1); the write is posted, and may take as
/// long to arrive.
const RESET_TIME: Duration = Duration::from_micros(10);

/// Share of the packet buffer for received frames in KB, as after power-on. The rest of the 40 KB is for
/// transmission; the register's upper half gives that share, and no driver writes it.
pub const PBA: u32 = 20;

/// Key of the receive-side hash, from its specification ("RSS Hashing Functions", the verification suite's key).
const RSS_KEY: [u32; 10] = [
    0xda56_5a6d,
    0xc20e_5b25,
    0x3d25_6741,
    0xb08f_a343,
    0xcb2b_cad0,
    0xb430_7bae,
    0xa32d_cb77,
    0x0cf2_3080,
    0x3bb7_426a,
    0xfa01_acbe,
];

/// Shape of rings and frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub ring: u16,
    pub queues: u8,
    pub mtu: u16,
    /// Number of bytes of each slot that the card may write.
    pub buffer: u16,
}

impl Shape {
    /// Returns the shape that these options ask for.
    pub fn of(options: &NicOptions, memory: &MemoryLayout) -> Result<Shape, NicError> {
        Shape::new(options.ring, options.queues, options.mtu, memory)
    }

    /// Returns the requested shape, if the card supports it and the memory is large enough.
    pub fn new(ring: u16, queues: u8, mtu: u16, memory: &MemoryLayout) -> Result<Shape, NicError> {
        let refuse = |field, value, must| Err(NicError::Options { field, value, must });
        if !ring.is_power_of_two() || !(RING_MIN..=RING_MAX).contains(&ring.into()) {
            return refuse("ring", ring.into(), "it must be a power of two from 8 to 1024");
        }
        if !(1..=QUEUES_MAX).contains(&queues.into()) {
            return refuse("queues", queues.into(), "it must be 1 or 2");
        }
        if !(MTU_MIN..=MTU_MAX).contains(&mtu) {
            return refuse("mtu", mtu.into(), "it must be from 68 to 9000");
        }
        let lacks = |what, need, have| Err(NicError::Memory { what, need, have });
        // Without the check sequence. The card strips it, but the buffer must have room for it.
        let frame = mtu + AROUND_PAYLOAD;
        let buffer = [2048_u16, 4096, 8192, 16384].into_iter().find(|&buffer| buffer >= frame + 4);
        let buffer = buffer.expect("an MTU of at most 9,000 fits 16 KiB");
        let slots = memory.slots;
        if slots.slot_len < buffer.into() {
            return lacks("slots", buffer.into(), slots.slot_len as usize);
        }
        let need = usize::from(queues) * usize::from(ring) * slots.slot_len as usize;
        if slots.len() < need {
            return lacks("frames", need, slots.len());
        }
        let need = rings_len(queues, ring);
        if memory.rings_len < need {
            return lacks("rings", need, memory.rings_len);
        }
        Ok(Shape { ring, queues, mtu, buffer })
    }

    /// Returns the address, as the card sees it, of ring number `index`: the receive rings come first, then the
    /// transmit ring.
    pub fn ring_at(self, rings_at: Iova, index: usize) -> Iova {
        rings_at + (index * usize::from(self.ring) * DESCRIPTOR_LEN) as u64
    }

    /// Returns the maximum length of a frame in bytes, without its check sequence.
    pub fn frame(self) -> u16 {
        self.mtu + AROUND_PAYLOAD
    }
}

/// Polls until `done`, for at most `limit`. Returns whether it was done.
///
/// Polls a few times, however long each takes: the process that models a card may have been asleep meanwhile.
pub fn within(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    const ASKED_AT_LEAST: u32 = 16;
    let waiting = Waiting::begin();
    let mut asked = 0;
    loop {
        if done() {
            return true;
        }
        asked += 1;
        if waiting.since() > limit && asked >= ASKED_AT_LEAST {
            return false;
        }
        waiting.rest();
    }
}

fn wait(step: &'static str, done: impl FnMut() -> bool) -> Result<(), NicError> {
    match within(RESET_LIMIT, done) {
        true => Ok(()),
        false => {
            let limit_ms = u32::try_from(RESET_LIMIT.as_millis()).unwrap_or(u32::MAX);
            Err(NicError::Stuck { step, limit_ms })
        }
    }
}

/// Stops all that a predecessor left running, and resets the card, but not its PHY: sections 4.6.1 and 5.2.
pub fn reset<R: Registers>(mmio: &Mmio<R>) -> Result<(), NicError> {
    if mmio.read(regs::STATUS) == u32::MAX {
        return Err(NicError::Gone);
    }
    mmio.write(regs::IMC, u32::MAX);
    mmio.write(regs::RCTL, 0);
    mmio.change(regs::TCTL, tctl::EN | tctl::SWXOFF, 0);
    mmio.change(regs::CTRL, 0, ctrl::GIO_MASTER_DISABLE);
    // If the time runs out, a bus transaction is stuck, and the reset ends it.
    within(RESET_LIMIT, || mmio.read(regs::STATUS) & status::GIO_MASTER_ENABLE == 0);
    // The value takes effect with the reset, which does not change it.
    mmio.write(regs::PBA, PBA);
    mmio.change(regs::CTRL, ctrl::PHY_RST, ctrl::RST);
    within(RESET_TIME, || false);
    wait("its reset", || mmio.read(regs::CTRL) & ctrl::RST == 0)?;
    wait("reading its EEPROM", || mmio.read(regs::EECD) & eecd::AUTO_RD != 0)?;
    mmio.write(regs::IMC, u32::MAX);
    mmio.take(regs::ICR);
    Ok(())
}

/// Does the general setup: sections 4.6.3 and 4.6.4, and the further settings of the maker's drivers.
pub fn general<R: Registers>(mmio: &Mmio<R>) {
    // The PHY alone negotiates the link.
    mmio.change(
        regs::CTRL,
        ctrl::GIO_MASTER_DISABLE | ctrl::FRCSPD | ctrl::FRCDPLX | ctrl::VME | ctrl::PHY_RST,
        ctrl::SLU,
    );
    mmio.change(
        regs::CTRL_EXT,
        ctrl_ext::RESERVED_ZERO | ctrl_ext::EIAME | ctrl_ext::IAME,
        ctrl_ext::RESERVED_ONE | ctrl_ext::DRV_LOAD | ctrl_ext::PBA_CLR,
    );
    mmio.change(regs::GCR, 0, gcr::COMPLETIONS);
    mmio.change(regs::GCR2, 0, gcr::COMPLETIONS_2);
    // Interrupts: one vector for both receive queues. It fires at once, and masks itself when it does.
    mmio.write(regs::IVAR, regs::ivar::RXQ_TO_0);
    mmio.write(regs::EIAC, regs::cause::RXQ);
    mmio.write(regs::EITR.of(0), 0);
    mmio.write(regs::RDTR, 0);
    mmio.write(regs::RADV, 0);
    mmio.write(regs::TIDV, 0);
    mmio.write(regs::TADV, 0);
}

/// Sets up the receive side, still off, with empty rings: section 4.6.5.
pub fn receive<R: Registers>(mmio: &Mmio<R>, shape: Shape, rings_at: Iova) {
    receive_but_tails(mmio, shape, rings_at);
    (0..2).for_each(|index| mmio.write(regs::RDT.of(index), 0));
}

/// Does the same, except for the tails. This is for a card with waiting frames: QEMU's model loses one for each tail
/// that is written while it is off.
pub fn receive_but_tails<R: Registers>(mmio: &Mmio<R>, shape: Shape, rings_at: Iova) {
    for queue in 0..QUEUES_MAX {
        let index = u32::try_from(queue).expect("there are two");
        let used = queue < shape.queues.into();
        let at = if used { shape.ring_at(rings_at, queue) } else { Iova(0) };
        let len = if used { u32::from(shape.ring) * 16 } else { 0 };
        let (low, high) = at.halves();
        mmio.write(regs::RDLEN.of(index), len);
        mmio.write(regs::RDBAH.of(index), high);
        mmio.write(regs::RDBAL.of(index), low);
        // This is allowed only between a reset and the first enabling.
        mmio.write(regs::RDH.of(index), 0);
        mmio.write(regs::RXDCTL.of(index), dctl::EACH);
    }
    mmio.write(regs::RFCTL, rfctl::EXSTEN);
    if shape.queues == 1 {
        mmio.write(regs::MRQC, 0);
        mmio.write(regs::RXCSUM, 0);
        return;
    }
    for (index, word) in (0..).zip(RSS_KEY) {
        mmio.write(regs::RSSRK.of(index), word);
    }
    for index in 0..32 {
        // Bit 7 of each byte selects the queue.
        mmio.write(regs::RETA.of(index), 0x8000_8000);
    }
    mmio.write(regs::RXCSUM, rxcsum::PCSD);
    mmio.write(regs::MRQC, mrqc::RSS | mrqc::FIELDS);
}

/// Sets up the transmit side, still off: section 4.6.6.
pub fn transmit<R: Registers>(mmio: &Mmio<R>, shape: Shape, rings_at: Iova) {
    let (low, high) = shape.ring_at(rings_at, shape.queues.into()).halves();
    mmio.write(regs::TDLEN, u32::from(shape.ring) * 16);
    mmio.write(regs::TDBAH, high);
    mmio.write(regs::TDBAL, low);
    mmio.write(regs::TDH, 0);
    mmio.write(regs::TDT, 0);
    mmio.write(regs::TXDCTL, dctl::EACH | dctl::TX_RESERVED_ONE);
    mmio.write(regs::TARC0, tarc::SOUND);
    mmio.write(regs::TIPG, regs::TIPG_COPPER);
}

/// Returns the values of the receive and the transmit control register, without the bits that switch the units on.
pub fn controls(shape: Shape, filter: u32) -> [u32; 2] {
    let buffer = rctl::buffer(shape.buffer.into()).expect("a shape's buffers are of a length that the card knows");
    let long = if shape.frame() + 4 > LONG_FROM { rctl::LPE } else { 0 };
    [rctl::BAM | rctl::SECRC | buffer | long | filter, tctl::PSP | tctl::COLLISIONS | tctl::REQUESTS]
}

/// Switches both sides on, the transmit side first: an answer may follow a frame at once.
pub fn enable<R: Registers>(mmio: &Mmio<R>, shape: Shape, filter: u32) {
    let [receive, transmit] = controls(shape, filter);
    mmio.write(regs::TCTL, tctl::EN | transmit);
    mmio.write(regs::RCTL, rctl::EN | receive);
}

/// Returns the Ethernet address that the card read from its EEPROM.
pub fn mac<R: Registers>(mmio: &Mmio<R>) -> Result<Mac, NicError> {
    let (low, high) = (mmio.read(regs::RAL.of(0)), mmio.read(regs::RAH.of(0)));
    let ([a, b, c, d], [e, f, ..]) = (low.to_le_bytes(), high.to_le_bytes());
    let value = u64::from(high) << 32 | u64::from(low);
    if high & rah::AV == 0 || a & 1 == 1 || value << 16 == 0 {
        return Err(NicError::Absurd { what: "its own address", value });
    }
    Ok(Mac([a, b, c, d, e, f]))
}
