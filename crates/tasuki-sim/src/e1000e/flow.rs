//! PAUSE frames, honoured and sent (§3.5.5, §10.2.2.7 to 10.2.2.10, §10.2.5.4).

use super::Device;
use super::regs::{self, ctrl, fcrtl, tctl};
use crate::model::Host;
use crate::wire::Wire;

/// Nanoseconds of a quantum at 1 Gb/s: 512 bits.
const QUANTUM_NS: u64 = 512;

const PAUSE_OPCODE: [u8; 2] = [0x00, 0x01];

/// Bytes of a PAUSE frame without its check sequence.
const PAUSE_LEN: usize = 60;

#[derive(Debug, Default)]
pub(super) struct Flow {
    /// End of the pause that the partner asked for.
    pub paused_until: u64,
    /// The driver wrote TCTL.SWXOFF.
    pub software_pause: bool,
    /// When to repeat the XOFF that the threshold caused; `None` if no such XOFF is in force.
    stopped: Option<u64>,
}

impl Device {
    /// Returns the quanta of `frame` if it is a PAUSE frame for this card.
    pub(super) fn pause_of(&self, frame: &[u8]) -> Option<u16> {
        let (head, rest) = frame.split_at_checked(18)?;
        let kind = (self.get(regs::FCT) as u16).to_be_bytes();
        if head[12..14] != kind || head[14..16] != PAUSE_OPCODE || rest.len() < 28 {
            return None;
        }
        let [a, b, c, d] = self.get(regs::FCAL).to_le_bytes();
        let [e, f, ..] = self.get(regs::FCAH).to_le_bytes();
        let to = &head[..6];
        let ours = self.addresses[0] == super::receive::address(to);
        (to == [a, b, c, d, e, f] || ours).then(|| u16::from_be_bytes([head[16], head[17]]))
    }

    /// Handles a received PAUSE frame.
    pub(super) fn pause(&mut self, quanta: u16) {
        if self.get(regs::CTRL) & ctrl::RFCE == 0 {
            self.count(regs::FCRUC, 1);
            return;
        }
        self.count(if quanta == 0 { regs::XONRXC } else { regs::XOFFRXC }, 1);
        self.flow.paused_until = self.now + u64::from(quanta) * QUANTUM_NS;
    }

    /// Returns whether the partner has asked for a pause.
    pub(super) fn paused(&self) -> bool {
        self.now < self.flow.paused_until
    }

    /// Checks the threshold after each frame once a quarter of the buffer is full: many frames may come in one step
    /// of the model, and the partner must be able to stop between two of them.
    #[inline]
    pub(super) fn pause_at_once(&mut self, host: &mut impl Host, wire: &mut impl Wire) {
        if self.flow.stopped.is_none() && self.fifo.used() > self.fifo.capacity() / 4 {
            // The bus is faster than the wire: a frame that has a descriptor is gone before the next one is here.
            self.deliver(host);
            self.send_pause(wire);
        }
    }

    /// Sends the partner XOFF or XON if due; returns whether it sent one. A pause does not hold back PAUSE frames.
    pub(super) fn send_pause(&mut self, wire: &mut impl Wire) -> bool {
        if !self.link.up || self.get(regs::TCTL) & tctl::EN == 0 {
            return false;
        }
        let quanta = self.get(regs::FCTTV) as u16;
        if std::mem::take(&mut self.flow.software_pause) {
            self.pause_frame(quanta, wire);
            return true;
        }
        if self.get(regs::CTRL) & ctrl::TFCE == 0 {
            return false;
        }
        let used = self.fifo.used();
        let high = self.get(regs::FCRTH) as usize;
        let low = self.get(regs::FCRTL);
        match self.flow.stopped {
            None if high != 0 && used >= high => self.stop(quanta, wire),
            Some(again) if used >= high && self.now >= again => self.stop(quanta, wire),
            Some(_) if used < (low & !fcrtl::XONE) as usize => {
                self.flow.stopped = None;
                if low & fcrtl::XONE == 0 {
                    return false;
                }
                self.pause_frame(0, wire);
            }
            _ => return false,
        }
        true
    }

    fn stop(&mut self, quanta: u16, wire: &mut impl Wire) {
        // Repeat XOFF when the partner's timer has run down to FCRTV; never if FCRTV is 0.
        let refresh = self.get(regs::FCRTV) as u16;
        let after = u64::from(quanta.saturating_sub(refresh)) * QUANTUM_NS;
        self.flow.stopped = Some(if refresh == 0 { u64::MAX } else { self.now + after.max(1) });
        self.pause_frame(quanta, wire);
    }

    fn pause_frame(&mut self, quanta: u16, wire: &mut impl Wire) {
        let mut frame = [0; PAUSE_LEN];
        frame[0..4].copy_from_slice(&self.get(regs::FCAL).to_le_bytes());
        frame[4..6].copy_from_slice(&self.get(regs::FCAH).to_le_bytes()[..2]);
        frame[6..10].copy_from_slice(&self.get(regs::RAL).to_le_bytes());
        frame[10..12].copy_from_slice(&self.get(regs::RAL.nth(1)).to_le_bytes()[..2]);
        frame[12..14].copy_from_slice(&(self.get(regs::FCT) as u16).to_be_bytes());
        frame[14..16].copy_from_slice(&PAUSE_OPCODE);
        frame[16..18].copy_from_slice(&quanta.to_be_bytes());
        self.count(if quanta == 0 { regs::XONTXC } else { regs::XOFFTXC }, 1);
        wire.send(&frame, self.now);
    }
}
