//! The queue for commands (virtio 1.2, §5.1.6.5): one at a time, and the driver waits for the answer.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use tasuki_shm::region::Span;

use super::regs::control;
use super::ring::{NEXT, Place, SplitRing, WRITE};
use super::sash::Cursor;
use super::transport::{Doorbell, Transport};
use crate::nic::bus::{Iova, Registers};
use crate::nic::register::wait;
use crate::nic::{Filter, Mac, NicError, NicMemory};

/// Descriptors of the queue: the command, and the answer.
pub const SIZE: u16 = 2;
/// Bytes of the memory that commands need: an answer on a line of its own, and the longest command.
pub const MEMORY_LEN: usize = 64 + COMMAND_LEN;
const COMMAND_LEN: usize = 2048;
/// Multicasts that fit into a command, after its class, its name and two counts.
const MULTICASTS_MAX: usize = (COMMAND_LEN - 2 - 8) / 6;

/// What no device answers.
const NO_ANSWER: u8 = 0xa5;
/// How long it may take. It is work for whoever runs the device, not for silicon.
const COMMAND_MS: u32 = 5000;

/// The queue for commands.
#[derive(Debug)]
pub struct Control {
    ring: SplitRing,
    bell: Doorbell,
    /// The answer, then the command.
    words: Span<AtomicU64>,
}

impl Control {
    /// The queue at `place`, its commands from byte `at` of the rings' region on.
    pub fn new(memory: &NicMemory, place: Place, at: usize, event_index: bool, cursor: Cursor, bell: Doorbell) -> Self {
        let ring = SplitRing::new(memory, place, SIZE, event_index, cursor);
        let words = memory.rings().span(at, MEMORY_LEN / 8).expect("the layout was checked against the region");
        let answer: Iova = memory.rings_at() + at as u64;
        ring.describe(1, answer, 1, WRITE, 0);
        Control { ring, bell, words }
    }

    /// Where a successor goes on.
    pub fn cursor(&self) -> Cursor {
        self.ring.cursor()
    }

    /// Lets in what `filter` says. The device is asked for the more before the less, so that nothing is shut out meanwhile that was
    /// let in before and will be after.
    pub fn set_filter<R: Registers>(
        &mut self,
        transport: &Transport<R>,
        memory: &NicMemory,
        at: usize,
        filter: &Filter,
    ) -> Result<(), NicError> {
        let all = filter.all_multicast || filter.multicast.len() > MULTICASTS_MAX;
        let mut command =
            |class, name, data: &[u8]| self.command(transport, memory, at, &[&[class, name], data].concat());
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
        memory: &NicMemory,
        at: usize,
        bytes: &[u8],
    ) -> Result<(), NicError> {
        const STEP: &str = "a command";
        if self.ring.cursor().available != self.ring.cursor().used {
            return Err(NicError::Stuck { step: "an earlier command", limit_ms: COMMAND_MS });
        }
        self.words[0].store(NO_ANSWER.into(), Relaxed);
        for (word, bytes) in self.words[8..].iter().zip(bytes.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(padded), Relaxed);
        }
        let len = u32::try_from(bytes.len()).expect("commands are shorter than their memory");
        self.ring.describe(0, memory.rings_at() + (at + 64) as u64, len, NEXT, 1);
        self.ring.push(0);
        self.ring.publish();
        // Never left out: there is one command a minute, and nobody waits for less than the answer.
        transport.ring(self.bell);
        let mut used = Ok(None);
        let waited = wait(STEP, COMMAND_MS, || {
            used = self.ring.peek();
            !matches!(used, Ok(None))
        });
        waited.or_else(|stuck| transport.status().and(Err(stuck)))?;
        match used? {
            Some(chain) if chain.head == 0 => self.ring.take(),
            other => {
                let head = other.map_or(0, |chain| chain.head);
                return Err(NicError::Absurd { what: "a used command that it does not have", value: head.into() });
            }
        }
        let [answer, ..] = self.words[0].load(Acquire).to_le_bytes();
        match answer {
            control::OK => Ok(()),
            refused => Err(NicError::Options { field: "filter", value: refused.into(), must: "the device refuses it" }),
        }
    }
}

/// The addresses to let in besides our own: no unicasts, then multicasts.
fn table(multicast: &[Mac]) -> Vec<u8> {
    let count = u32::try_from(multicast.len()).expect("checked to fit into a command");
    let mut bytes = [0_u32.to_le_bytes(), count.to_le_bytes()].concat();
    bytes.extend(multicast.iter().flat_map(|mac| mac.0));
    bytes
}
