//! Warm-up: prepares pages that a worker needs later. A stand-by has run hardly any of the code that it runs when it
//! takes a NIC over. Each page of its program that it touches then for the first time costs a microsecond in which no
//! worker drives.
//!
//! # Invariants
//!
//! - **W1** The ranges are mappings of this process as the kernel has just listed them, and this process has one
//!   thread, which unmaps nothing meanwhile. Having pages mapped changes nothing in them.
//! - **W2** The allocator's settings decide when it gets memory from the kernel and gives it back. They change no
//!   memory that it has handed out. No other thread allocates meanwhile: this process has one thread.
#![allow(unsafe_code, reason = "madvise takes addresses (W1), and mallopt is C (W2)")]

use rustix::mm::Advice;
use tasuki_shm::clock::now_ns;

/// Bytes of heap to have before they are needed. After its start a worker allocates less than half of that.
#[cfg(target_env = "gnu")]
const ROOM: usize = 256 << 10;
/// Anonymous mappings longer than this, in bytes, are not heap.
const LARGE: usize = 1 << 20;

/// Has the allocator keep its memory: giving memory back to the kernel and getting it again takes as long as taking
/// a NIC over does.
#[cfg(target_env = "gnu")]
fn keep_heap() {
    for (what, value) in [(libc::M_TRIM_THRESHOLD, i32::MAX), (libc::M_MMAP_THRESHOLD, 4 << 20)] {
        // SAFETY: it sets two numbers of the allocator, and moves nothing that is in use (W2).
        unsafe { libc::mallopt(what, value) };
    }
    // The pages of this memory are mapped together with those of the heap: mapped one by one they take three times
    // as long.
    drop(std::hint::black_box(Vec::<u8>::with_capacity(ROOM)));
}

/// Other C libraries have no such settings: there, pages of the heap come one by one, a microsecond each.
#[cfg(not(target_env = "gnu"))]
fn keep_heap() {}

/// Has the kernel map the program, the heap and the stack, and resolves the clock function. Pages that cannot be
/// mapped now are mapped at the first access.
pub fn up() {
    // The first call for the time looks its function up in the kernel's mapping (the vDSO), which takes as long as
    // all the rest of taking a NIC over.
    std::hint::black_box(now_ns());
    keep_heap();
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else { return };
    for (start, len, advice) in maps.lines().filter_map(range) {
        let address = std::ptr::without_provenance_mut(start);
        // SAFETY: the range is mapped, and its contents are not changed (W1).
        let _ = unsafe { rustix::mm::madvise(address, len, advice) };
    }
}

/// Parses a line of the list: start and length of a mapping in bytes, and the advice that maps its pages. Returns
/// nothing for mappings that are mapped already or are not memory.
fn range(line: &str) -> Option<(usize, usize, Advice)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    let rights = words.next()?;
    let name = words.nth(3).unwrap_or_default();
    let is_program = name.starts_with('/') && !name.starts_with("/memfd:") && !name.starts_with("/dev/");
    let len = end.saturating_sub(start);
    let is_writable = rights.starts_with("rw");
    // The zeroed data of a program or a library has no name, nor have large allocations.
    let is_zeroes = name.is_empty() && is_writable && len <= LARGE;
    let is_ours = is_program || is_zeroes || ["[heap]", "[stack]"].contains(&name);
    let advice = if is_writable { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    (is_ours && rights.starts_with('r') && rights.ends_with('p')).then_some((start, len, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_heaps_and_stacks_are_ours() {
        let line = |text: &str| range(text).map(|(start, len, _)| (start, len));
        assert_eq!(
            line("55d0-55f0 r-xp 00001000 fe:00 1234                    /usr/bin/tasuki-worker"),
            Some((0x55d0, 0x20))
        );
        assert_eq!(line("7f00-8f00 rw-p 00000000 00:00 0                       [heap]"), Some((0x7f00, 0x1000)));
        assert_eq!(
            line("7f00-8f00 rw-s 00000000 00:01 77                      /memfd:tasuki-nic-rings (deleted)"),
            None
        );
        assert_eq!(line("7f00-8f00 r--p 00000000 00:00 0                       [vvar]"), None);
        assert_eq!(line("7f00-8f00 ---p 00000000 fe:00 12                      /usr/lib/libc.so.6"), None);
        assert_eq!(line("7f00-8f00 rw-p 00000000 00:00 0 "), Some((0x7f00, 0x1000)));
        assert_eq!(line("10000000-20000000 rw-p 00000000 00:00 0 "), None, "somebody asked for 256 MiB");
        assert_eq!(line("nonsense"), None);
    }
}
