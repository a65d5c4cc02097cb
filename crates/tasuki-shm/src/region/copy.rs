//! Copies of bytes that another process may write meanwhile, and hints to the CPU that fetch such bytes early.
//!
//! The invariants M1 and M2 are those of the module above.
#![allow(unsafe_code, reason = "assembly that copies bytes which another process may be writing")]

use std::ptr::NonNull;

use crate::line::LINE_LEN;

/// Copies `len` bytes, while another process may write the bytes at `from`, and read or write the bytes at `to`.
///
/// A copy in Rust would be a data race; a copy in assembly has the CPU's semantics. It copies line by line. If the
/// length is not a multiple of a line, it copies the last line's worth of bytes once more.
/// docs/decisions/0015-a-pool-goes-round.md compares the speed of the instructions.
///
/// # Safety
/// `from` is mapped for reading and `to` for writing for `len` bytes (M1); no code of this process has a reference
/// to the bytes written (M2).
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) unsafe fn copy_abroad(from: *const u8, to: *mut u8, len: usize) {
    if len < LINE_LEN {
        // SAFETY: as the caller vouches (M1, M2).
        return unsafe { copy_little(from, to, len) };
    }
    // SAFETY: copies the front and the back of the caller's bytes (M1, M2), each a whole number of lines, to the same
    // place in `to`.
    unsafe {
        std::arch::asm!(
            "2:",
            "movups {a}, [{from}]",
            "movups {b}, [{from} + 16]",
            "movups {c}, [{from} + 32]",
            "movups {d}, [{from} + 48]",
            "movups [{to}], {a}",
            "movups [{to} + 16], {b}",
            "movups [{to} + 32], {c}",
            "movups [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "dec {lines}",
            "jnz 2b",
            // Go back to one whole line before the end. If the length is a whole number of lines, that is the last
            // line again.
            "movups {a}, [{from} + {back}]",
            "movups {b}, [{from} + {back} + 16]",
            "movups {c}, [{from} + {back} + 32]",
            "movups {d}, [{from} + {back} + 48]",
            "movups [{to} + {back}], {a}",
            "movups [{to} + {back} + 16], {b}",
            "movups [{to} + {back} + 32], {c}",
            "movups [{to} + {back} + 48], {d}",
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            lines = inout(reg) len / LINE_LEN => _,
            back = in(reg) (len % LINE_LEN).wrapping_sub(LINE_LEN),
            options(nostack)
        );
    }
}

/// Like [`copy_abroad`], less than a line: the front and the back, which may overlap. Plain loads, unlike a string
/// instruction, let the next frame's begin before these have come from another core's cache.
///
/// # Safety
/// As for [`copy_abroad`].
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_little(from: *const u8, to: *mut u8, len: usize) {
    match len {
        0 => {}
        1..4 => {
            // SAFETY: bytes 0, half and last are within `len` (M1, M2).
            unsafe {
                std::arch::asm!(
                    "movzx {a:e}, byte ptr [{from}]",
                    "movzx {b:e}, byte ptr [{from} + {half}]",
                    "movzx {c:e}, byte ptr [{from} + {last}]",
                    "mov byte ptr [{to}], {a:l}",
                    "mov byte ptr [{to} + {half}], {b:l}",
                    "mov byte ptr [{to} + {last}], {c:l}",
                    a = out(reg_abcd) _,
                    b = out(reg_abcd) _,
                    c = out(reg_abcd) _,
                    from = in(reg) from,
                    to = in(reg) to,
                    half = in(reg) len / 2,
                    last = in(reg) len - 1,
                    options(nostack, preserves_flags)
                );
            }
        }
        4..8 => {
            // SAFETY: the first and the last 4 bytes are within `len` (M1, M2).
            unsafe {
                std::arch::asm!(
                    "mov {a:e}, dword ptr [{from}]",
                    "mov {b:e}, dword ptr [{from} + {back}]",
                    "mov dword ptr [{to}], {a:e}",
                    "mov dword ptr [{to} + {back}], {b:e}",
                    a = out(reg) _,
                    b = out(reg) _,
                    from = in(reg) from,
                    to = in(reg) to,
                    back = in(reg) len - 4,
                    options(nostack, preserves_flags)
                );
            }
        }
        8..16 => {
            // SAFETY: the first and the last 8 bytes are within `len` (M1, M2).
            unsafe {
                std::arch::asm!(
                    "mov {a}, qword ptr [{from}]",
                    "mov {b}, qword ptr [{from} + {back}]",
                    "mov qword ptr [{to}], {a}",
                    "mov qword ptr [{to} + {back}], {b}",
                    a = out(reg) _,
                    b = out(reg) _,
                    from = in(reg) from,
                    to = in(reg) to,
                    back = in(reg) len - 8,
                    options(nostack, preserves_flags)
                );
            }
        }
        _ => {
            // Of 16 to 63 bytes, the second and the third piece lie as far in as they can.
            let inner = if len < 32 { 0 } else { 16 };
            // SAFETY: each of the four pieces of 16 bytes is within `len` (M1, M2).
            unsafe {
                std::arch::asm!(
                    "movups {a}, [{from}]",
                    "movups {b}, [{from} + {inner}]",
                    "movups {c}, [{from} + {outer}]",
                    "movups {d}, [{from} + {back}]",
                    "movups [{to}], {a}",
                    "movups [{to} + {inner}], {b}",
                    "movups [{to} + {outer}], {c}",
                    "movups [{to} + {back}], {d}",
                    a = out(xmm_reg) _,
                    b = out(xmm_reg) _,
                    c = out(xmm_reg) _,
                    d = out(xmm_reg) _,
                    from = in(reg) from,
                    to = in(reg) to,
                    inner = in(reg) inner,
                    outer = in(reg) len - 16 - inner,
                    back = in(reg) len - 16,
                    options(nostack, preserves_flags)
                );
            }
        }
    }
}

/// Copies byte by byte, each by an atomic load: the version for other CPUs.
///
/// # Safety
/// As above (M1).
#[cfg(not(target_arch = "x86_64"))]
pub(super) unsafe fn copy_abroad(from: *const u8, to: *mut u8, len: usize) {
    use std::sync::atomic::AtomicU8;
    // SAFETY: the caller promises that `len` bytes are mapped (M1), and bytes are always aligned; atomics only (M2).
    let from = unsafe { std::slice::from_raw_parts(from.cast::<AtomicU8>(), len) };
    // SAFETY: as above (M1, M2).
    let to = unsafe { std::slice::from_raw_parts(to.cast::<AtomicU8>(), len) };
    to.iter().zip(from).for_each(|(to, from)| to.store(from.load(crate::sync::Relaxed), crate::sync::Relaxed));
}

/// Loads 8 bytes that another process may be writing into a register.
///
/// A copy into our own memory would be loaded again in other parts than those in which it was stored. The CPU then waits
/// until all earlier stores are in its cache: some 50 ns, if one of them is to a line that another CPU has.
///
/// # Safety
/// `from` is mapped for reading for 8 bytes (M1). It need not be aligned.
#[inline]
pub(super) unsafe fn load_word(from: *const u8) -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        let word;
        // SAFETY: loads 8 bytes that the caller vouches for (M1).
        unsafe {
            std::arch::asm!(
                "mov {word}, qword ptr [{from}]",
                word = out(reg) word,
                from = in(reg) from,
                options(nostack, preserves_flags, readonly)
            );
        }
        word
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let mut bytes = [0; 8];
        // SAFETY: as the caller vouches (M1); `bytes` are ours alone.
        unsafe { copy_abroad(from, bytes.as_mut_ptr(), 8) };
        u64::from_ne_bytes(bytes)
    }
}

/// Stores 8 bytes that another process may be reading or writing, from a register: see [`load_word`].
///
/// # Safety
/// `to` is mapped for writing for 8 bytes (M1), to which no code of this process has a reference (M2). It need not be
/// aligned.
#[inline]
pub(super) unsafe fn store_word(to: *mut u8, word: u64) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: stores 8 bytes that the caller vouches for (M1, M2).
    unsafe {
        std::arch::asm!(
            "mov qword ptr [{to}], {word}",
            to = in(reg) to,
            word = in(reg) word,
            options(nostack, preserves_flags)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: as the caller vouches (M1, M2).
    unsafe {
        copy_abroad(word.to_ne_bytes().as_ptr(), to, 8);
    }
}

/// Asks the CPU for the lines of `len` bytes from `first` on, for writing soon. A hint: it reads and changes
/// nothing.
pub(super) fn prefetch_to_write(first: NonNull<u8>, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len).step_by(LINE_LEN) {
        // Written in assembly, because on plain x86-64 the compiler turns the intrinsic into a prefetch for reading.
        // CPUs without the instruction treat it as a NOP.
        // SAFETY: a prefetch of any address has no effect that a program could see; this one is mapped besides (M1).
        unsafe {
            std::arch::asm!(
                "prefetchw [{}]",
                in(reg) first.as_ptr().wrapping_add(offset),
                options(nostack, preserves_flags, readonly)
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, len);
}

/// Asks the CPU for the lines of `len` bytes from `first` on, for reading soon. A hint.
#[inline]
pub(super) fn prefetch_to_read(first: NonNull<u8>, len: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..len).step_by(LINE_LEN) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address has no effect that a program could see; this one is mapped besides (M1).
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.as_ptr().wrapping_add(offset).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, len);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length takes each of its bytes, and none beside: all branches, and their borders.
    #[test]
    fn a_copy_of_any_length_is_whole_and_stays_inside() {
        let from: Vec<u8> = (0..=255).collect();
        for len in 0..=4 * LINE_LEN - 1 {
            let mut to = vec![0xee; len + 2 * LINE_LEN];
            // SAFETY: both vectors have the bytes (M1), and no other reference exists meanwhile (M2).
            unsafe { copy_abroad(from.as_ptr(), to.as_mut_ptr().wrapping_add(LINE_LEN), len) };
            let (before, rest) = to.split_at(LINE_LEN);
            let (copy, after) = rest.split_at(len);
            assert_eq!(copy, &from[..len], "{len} bytes");
            assert!(before.iter().chain(after).all(|byte| *byte == 0xee), "a byte beside {len} was written");
        }
    }
}
