//! Memory that both roles of a case write and read as plain bytes, for the floor and the baseline. Tasuki's own
//! memory, which one process writes, is measured beside them.
//!
//! # Invariants
//!
//! - **S1** The mapping is `len` bytes from `base` on, of a file that cannot shrink, and stays until `Shared` is
//!   dropped.
//! - **S2** Both roles are this program, and only one of them at a time has a part of the memory. An index or a lock
//!   in other memory says which role has it, stored with release and loaded with acquire.
#![allow(unsafe_code, reason = "maps memory, and copies bytes that another process writes at other times")]

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use anyhow::{Context, Result, ensure};
use rustix::mm::{MapFlags, ProtFlags};
use tasuki_shm::region::{Pages, Region};

/// A mapping of such memory.
#[derive(Debug)]
pub struct Shared {
    base: NonNull<u8>,
    len: usize,
}

impl Shared {
    /// Makes `len` bytes of such memory.
    pub fn create(len: usize) -> Result<OwnedFd> {
        Ok(Region::create("tasuki-bench shared", len, Pages::Small)?.into_fd())
    }

    /// Maps the memory that [`create`](Self::create) made.
    pub fn map(memory: &OwnedFd, len: usize) -> Result<Self> {
        let stat = rustix::fs::fstat(memory).context("the memory of a case cannot be measured")?;
        let seals = rustix::fs::fcntl_get_seals(memory).context("the memory of a case has no seals")?;
        ensure!(seals.contains(rustix::fs::SealFlags::SHRINK), "the memory of a case could shrink");
        ensure!(usize::try_from(stat.st_size).is_ok_and(|have| have >= len), "the memory of a case is too short");
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::POPULATE);
        // SAFETY: a new mapping where the kernel chooses; the file has the length, and keeps it (S1).
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, memory, 0) };
        let base = base.context("the memory of a case cannot be mapped")?;
        Ok(Shared { base: NonNull::new(base.cast()).context("the kernel mapped nothing")?, len })
    }

    /// Copies `bytes` to `at`.
    #[inline]
    pub fn copy_in(&self, at: usize, bytes: &[u8]) {
        assert!(at <= self.len && bytes.len() <= self.len - at, "{} bytes at {at} of {}", bytes.len(), self.len);
        // SAFETY: inside the mapping (S1, asserted).
        let to = unsafe { self.base.as_ptr().add(at) };
        // SAFETY: `bytes` is no part of the mapping, of which no reference is ever made, and only this role uses
        // this part now (S1, S2).
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies the bytes at `at` into `into`.
    #[inline]
    pub fn copy_out(&self, at: usize, into: &mut [u8]) {
        assert!(at <= self.len && into.len() <= self.len - at, "{} bytes at {at} of {}", into.len(), self.len);
        // SAFETY: inside the mapping (S1, asserted).
        let from = unsafe { self.base.as_ptr().add(at) };
        // SAFETY: `into` is no part of the mapping, of which no reference is ever made, and no role writes this part
        // now (S1, S2).
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrows from it (S1).
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
