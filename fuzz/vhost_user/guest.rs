//! A guest that writes anything into its rings, and mostly chains that make sense.

use rustix::fs::FallocateFlags;

use crate::common::Choices;
use crate::memif::port::{OTHER, PORT, frame_to};
use crate::neighbours::WITNESS;
use crate::vm::{self, GUEST, Machine, PACKED};

/// Where the machine has its descriptors, available rings and used rings, of the first pair.
pub const RINGS: [[u64; 3]; 2] = [[0, 0x2000, 0x4000], [0x8000, 0xa000, 0xc000]];
const TABLES: u64 = 0x8_0000;

/// The guest makes a chain available, or writes something else.
/// `next` is where it writes next in each ring.
pub fn scribble(choices: &mut Choices<'_>, machine: &mut Machine, next: &mut [u16; 2]) {
    let queue = usize::from(choices.below(2));
    let [descriptors, available, used] = RINGS[queue];
    let size = machine.size;
    let is_packed = machine.features & PACKED != 0;
    match choices.below(24) {
        0 => machine.write(used + u64::from(choices.byte()), &choices.short().to_le_bytes()),
        1 => machine.write(available + u64::from(choices.byte()), &choices.short().to_le_bytes()),
        2 => machine.write(descriptors + u64::from(choices.short()) % 0x800, choices.bytes(16)),
        // An index that runs backwards, or too far.
        3 if !is_packed => {
            let index = machine.half(available + 2).wrapping_add(choices.byte().into()).wrapping_sub(100);
            machine.write(available + 2, &index.to_le_bytes());
        }
        4 => {
            let (how, at) = (FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, choices.short());
            let _ = rustix::fs::fallocate(&machine.memory, how, u64::from(at), u64::from(choices.short()) + 1);
        }
        5 => _ = rustix::io::write(&machine.kicks[queue], &choices.word().to_ne_bytes()),
        any => {
            let at = next[queue];
            let has_place = match is_packed {
                true => {
                    let flags = machine.half(descriptors + 16 * u64::from(at & 0x7fff) + 14);
                    flags & 0x80 == flags >> 8 & 0x80
                }
                false => machine.half(available + 2).wrapping_sub(machine.half(used + 2)) < size,
            };
            if !has_place && any > 6 {
                return;
            }
            let count = chain(choices, machine, queue, at);
            let on = u32::from(at & 0x7fff) + u32::from(count);
            let laps = on / u32::from(size);
            let wraps = (at >> 15) ^ u16::from(laps % 2 == 1);
            next[queue] = (on % u32::from(size)) as u16 | (wraps << 15);
            let _ = rustix::io::write(&machine.kicks[queue], &1_u64.to_ne_bytes());
        }
    }
}

/// Makes a chain available whose first descriptor goes to the place `at` of a packed ring. Returns the number of its
/// descriptors there.
fn chain(choices: &mut Choices<'_>, machine: &mut Machine, queue: usize, at: u16) -> u16 {
    let [descriptors, available, _] = RINGS[queue];
    let (size, is_packed) = (machine.size, machine.features & PACKED != 0);
    let is_table = choices.below(4) == 0;
    let (count, odd) = (1 + u16::from(choices.below(if size > 4 { 4 } else { 1 })), choices.below(8) == 0);
    let index = machine.half(available + 2);
    let first = if is_packed { at & 0x7fff } else { index.wrapping_mul(3) % size };
    let mut left = frame_to(
        [OTHER, WITNESS][usize::from(choices.below(2))],
        PORT,
        index.into(),
        14 + usize::from(choices.short()) % 3000,
    );
    if choices.below(8) == 0 {
        left.truncate(choices.byte().into());
    }
    left.splice(..0, [0; 12]);
    if choices.below(4) == 0 {
        left[..10].iter_mut().for_each(|byte| *byte = choices.byte());
    }
    for i in 0..count {
        let place = 0x40_0000 + 0x1_0000 * u64::from(first) + 0x1000 * u64::from(i);
        let rest = left.split_off(left.len().min(if i + 1 < count { usize::from(choices.byte()) } else { left.len() }));
        let part = std::mem::replace(&mut left, rest);
        machine.write(place, &part);
        let (mut address, mut len) = (GUEST + place, if queue == vm::SEND { part.len() } else { 2048 });
        let mut flags = u16::from(i + 1 < count) | if queue == vm::RECEIVE { 2 } else { 0 };
        let mut next = if is_table { i + 1 } else { (first + i + 1) % size };
        if odd && choices.below(2) == 0 {
            match choices.below(4) {
                0 => address = choices.word(),
                1 => len = choices.word() as u32 as usize,
                2 => flags = choices.short() & 0x7f7f,
                _ => next = choices.byte().into(),
            }
        }
        let (table, entry) = match is_table {
            true => (TABLES + 0x100 * u64::from(first), i),
            false => (descriptors, (first + i) % size),
        };
        let wraps = (at >> 15) ^ u16::from(first + i >= size);
        let last = if is_packed { [next, flags | if wraps == 1 { 0x80 } else { 0x8000 }] } else { [flags, next] };
        machine.describe(table, entry, address, len, last[0], last[1]);
    }
    if is_table {
        let flags = if at >> 15 == 1 { 0x84 } else { 0x8004 };
        let last = if is_packed { [first, flags] } else { [4, first] };
        let table = GUEST + TABLES + 0x100 * u64::from(first);
        machine.describe(descriptors, first, table, 16 * usize::from(count), last[0], last[1]);
    }
    if !is_packed {
        machine.write(available + 4 + 2 * u64::from(index % size), &first.to_le_bytes());
        machine.write(available + 2, &index.wrapping_add(1).to_le_bytes());
    }
    if is_table { 1 } else { count }
}
