//! Private memory for a frame whose destination is not known yet. A node uses it when its pool has pages, but no run
//! that holds the longest frame.
//!
//! A node that stages takes a page even for the shortest frame. A stalled reader then holds pages between those that
//! other readers have given back. Its quota bounds their number, not their places. Without this memory, the stalled
//! reader would hold up all others until the sender takes its pages back (V4).

use super::{BESIDE, PIECE_MAX, SendError, Vni};

/// Private memory for one frame.
#[derive(Debug)]
pub(super) struct Aside {
    /// Empty until it is needed: zeroing it takes microseconds, which a worker that takes over does not have.
    bytes: Vec<u8>,
    /// Whether the staged frame lies here.
    pub(super) is_used: bool,
}

impl Aside {
    pub(super) fn new() -> Self {
        Aside { bytes: Vec::with_capacity(PIECE_MAX + BESIDE), is_used: false }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.resize(PIECE_MAX + BESIDE, 0);
        &mut self.bytes
    }
}

impl Vni {
    /// Copies the frame into the pool, where there is room for its length, and sends it.
    #[cold]
    pub(super) fn post_aside(&mut self, to: u16, len: usize) -> Result<(), SendError> {
        self.draft(to, len)?;
        let neighbour = self.neighbours[usize::from(to)].as_mut().expect("there is a draft for it");
        let bytes = u32::try_from(len).expect("no longer than the longest");
        neighbour.outbox.drafted(bytes, &mut self.pool).copy_from_slice(&self.aside.bytes[..len]);
        self.aside.is_used = false;
        self.post(to, len, true);
        Ok(())
    }

    /// Like [`post_aside`](Self::post_aside), to all these nodes. Afterwards the frame lies here no longer, whichever
    /// nodes got it.
    #[cold]
    pub(super) fn post_aside_to_all(
        &mut self,
        nodes: impl IntoIterator<Item = u16>,
        len: usize,
    ) -> Result<usize, SendError> {
        let bytes = std::mem::take(&mut self.aside.bytes);
        let sent = self.send_to_all(nodes, len, true, |room| room.copy_from_slice(&bytes[..len]));
        self.aside.bytes = bytes;
        self.aside.is_used = false;
        // A node that stages does not go on filling a common run: the next such frame may be long in coming.
        if let Some((which, _)) = self.common.take() {
            self.shared.release(which, false, &mut self.pool);
        }
        sent
    }
}
