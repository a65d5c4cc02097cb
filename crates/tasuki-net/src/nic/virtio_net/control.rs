//! The command queue (virtio 1.2, §5.1.6.5): one command at a time, and the driver waits for the answer.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use tasuki_shm::region::Span;

use super::driver_state::Cursor;
use super::regs::control;
use super::ring::{NEXT, Place, SplitRing, WRITE};
use super::transport::{Doorbell, Transport};
use crate::nic::bus::{Iova, Registers};
use crate::nic::register::wait;
use crate::nic::{Filter, Mac, NicError, NicMemory};

/// Number of descriptors of the queue: the command, and the answer.
pub const SIZE: u16 = 2;
/// Bytes of memory for commands: an answer on a line of its own, and the longest command.
pub const MEMORY_LEN: usize = 64 + COMMAND_LEN;
const COMMAND_LEN: usize = 2048;
/// Maximum number of multicast addresses in a command, after its class, its name and two counts.
const MULTICASTS_MAX: usize = (COMMAND_LEN - 2 - 8) / 6;

/// Pairs of queues in use; one of them is ours.
pub const PAIRS: u16 = 2;

/// A value that no device answers.
const NO_ANSWER: u8 = 0xa5;
/// Time limit for a command, in ms. The host's software carries it out, not silicon.
const COMMAND_MS: u32 = 5000;

/// The command queue.
#[derive(Debug)]
pub struct Control {
    ring: SplitRing,
    bell: Doorbell,
    /// The answer, then the command.
    words: Span<AtomicU64>,
    /// Address at which the device sees `words`.
    at: Iova,
}

impl Control {
    /// Makes the queue at `place`, with its commands from byte `at` of the rings' region on. `commands` is the number
    /// of commands given to the device so far.
    pub fn new(memory: &NicMemory, place: Place, at: usize, event_index: bool, commands: u64, bell: Doorbell) -> Self {
        let cursor = Cursor { available: commands, used: commands };
        let ring = SplitRing::new(memory, place, SIZE, event_index, cursor);
        let words = memory.rings().span(at, MEMORY_LEN / 8).expect("the layout was checked against the region");
        Control { ring, bell, words, at: memory.rings_at() + at as u64 }
    }

    /// Restarts the queue, which the device does not know.
    pub fn begin(&mut self) {
        self.ring.begin_at(0, [].into_iter());
        self.ring.describe(1, self.at, 1, WRITE, 0);
    }

    /// Takes over from a predecessor that gave the device its last command, or was about to. That command may not be
    /// answered yet.
    pub fn adopt(&mut self) {
        self.ring.unless_used();
        self.ring.publish();
    }

    /// Returns the number of commands given to the device.
    pub fn commands(&self) -> u64 {
        self.ring.cursor().available
    }

    /// Asks the device to steer all frames to this pair of queues (§5.1.6.5.7): it hashes no type of frame, so that all
    /// go where unclassified ones do. The device has done so once the command [is obeyed](Self::is_obeyed).
    ///
    /// # Errors
    /// The device does not answer an earlier command.
    pub fn steer<R: Registers>(
        &mut self,
        transport: &Transport<R>,
        pair: u16,
        announce: &mut impl FnMut(u64),
    ) -> Result<(), NicError> {
        let mut data = Vec::with_capacity(64);
        // Hash types; length of the table, less one; queue for unclassified frames; the table, of one entry; transmit
        // queues.
        data.extend(0_u32.to_le_bytes());
        data.extend([0, pair, pair, PAIRS].into_iter().flat_map(u16::to_le_bytes));
        // A device takes an absent key to mean no steering at all.
        data.push(40);
        data.extend([0; 40]);
        self.give(transport, &[&[control::MQ, control::MQ_RSS_CONFIG], &data[..]].concat(), announce)
    }

    /// Sets the receive filter. Widens the filter before it narrows it, so that frames let in both before and after are
    /// never shut out in between. Before each command, tells `announce` the number of commands including it.
    ///
    /// # Errors
    /// The device refuses, or does not answer, this or an earlier command.
    pub fn set_filter<R: Registers>(
        &mut self,
        transport: &Transport<R>,
        filter: &Filter,
        announce: &mut impl FnMut(u64),
    ) -> Result<(), NicError> {
        let all = filter.all_multicast || filter.multicast.len() > MULTICASTS_MAX;
        let mut command =
            |class, name, data: &[u8]| self.command(transport, &[&[class, name], data].concat(), announce);
        let mut switches = [(control::RX_PROMISC, filter.promiscuous), (control::RX_ALLMULTI, all)];
        switches.sort_by_key(|(_, on)| !on);
        let table = table(if all { &[] } else { &filter.multicast });
        for (name, _) in switches.iter().filter(|(_, on)| *on) {
            command(control::RX, *name, &[1])?;
        }
        command(control::MAC, control::MAC_TABLE_SET, &table)?;
        for (name, _) in switches.iter().filter(|(_, on)| !*on) {
            command(control::RX, *name, &[0])?;
        }
        Ok(())
    }

    fn command<R: Registers>(
        &mut self,
        transport: &Transport<R>,
        bytes: &[u8],
        announce: &mut impl FnMut(u64),
    ) -> Result<(), NicError> {
        self.give(transport, bytes, announce)?;
        self.obeyed(transport)
    }

    /// Waits until the device has carried out the last command.
    ///
    /// # Errors
    /// The device refuses, or does not answer.
    pub fn obeyed<R: Registers>(&mut self, transport: &Transport<R>) -> Result<(), NicError> {
        self.wait("a command", transport)?;
        self.answer()
    }

    /// Returns whether the device has carried out the last command. Does not wait.
    ///
    /// # Errors
    /// The device refuses.
    pub fn is_obeyed(&mut self) -> Result<bool, NicError> {
        if !self.is_answered() && !self.take_answer()? {
            return Ok(false);
        }
        self.answer().map(|()| true)
    }

    fn give<R: Registers>(
        &mut self,
        transport: &Transport<R>,
        bytes: &[u8],
        announce: &mut impl FnMut(u64),
    ) -> Result<(), NicError> {
        if !self.is_answered() {
            // The driver that gave it is gone, or did not wait long enough.
            transport.ring(self.bell);
            self.wait("an earlier command", transport)?;
        }
        self.words[0].store(NO_ANSWER.into(), Relaxed);
        for (word, bytes) in self.words[8..].iter().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Relaxed);
        }
        let len = u32::try_from(bytes.len()).expect("commands are shorter than their memory");
        self.ring.describe(0, self.at + 64, len, NEXT, 1);
        self.ring.push(0);
        announce(self.commands());
        self.ring.publish();
        // Always ring: there is one command a minute, and its caller waits for the answer anyway.
        transport.ring(self.bell);
        Ok(())
    }

    fn answer(&self) -> Result<(), NicError> {
        let [answer, ..] = self.words[0].load(Acquire).to_le_bytes();
        match answer {
            control::OK => Ok(()),
            refused => Err(NicError::Absurd { what: "the answer to a command", value: refused.into() }),
        }
    }

    fn is_answered(&self) -> bool {
        self.ring.cursor().available == self.ring.cursor().used
    }

    /// Waits until the device is done with its command.
    fn wait<R: Registers>(&mut self, step: &'static str, transport: &Transport<R>) -> Result<(), NicError> {
        let mut taken = Ok(false);
        let waited = wait(step, COMMAND_MS, || {
            taken = self.take_answer();
            !matches!(taken, Ok(false))
        });
        waited.or_else(|stuck| transport.status().and(Err(stuck)))?;
        taken.map(drop)
    }

    /// Returns whether the device is done with its command.
    fn take_answer(&mut self) -> Result<bool, NicError> {
        match self.ring.peek()? {
            None => Ok(false),
            Some(chain) if chain.head == 0 => {
                self.ring.take();
                Ok(true)
            }
            Some(chain) => {
                Err(NicError::Absurd { what: "a used command that it does not have", value: chain.head.into() })
            }
        }
    }
}

/// Returns the table of addresses to let in besides our own: no unicasts, then multicasts.
fn table(multicast: &[Mac]) -> Vec<u8> {
    let count = u32::try_from(multicast.len()).expect("checked to fit into a command");
    let mut bytes = [0_u32.to_le_bytes(), count.to_le_bytes()].concat();
    bytes.extend(multicast.iter().flat_map(|mac| mac.0));
    bytes
}
