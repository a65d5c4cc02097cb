//! Where a frame is put, before anybody knows for whom it is, by a node whose pool has pages but no run of them for the longest.
//!
//! Who stages takes a page for the shortest frame. A reader that stands still then holds pages between those that others have read, and its quota
//! bounds how many, not how they lie: without this, it would hold up everybody until it is found out (V4).

use super::{PIECE_MAX, SendError, Vni};

/// Private memory for one frame.
#[derive(Debug)]
pub(super) struct Aside {
    bytes: Box<[u8]>,
    /// The frame that is staged lies here.
    pub(super) is_used: bool,
}

impl Aside {
    pub(super) fn new() -> Self {
        Aside { bytes: vec![0; PIECE_MAX].into(), is_used: false }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Vni {
    /// Copies what lies aside to where there is room for as much, and sends it.
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

    /// The same to all these nodes. It lies there no longer, whoever got it.
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
        // Who stages fills no run for all: the next such frame may be long in coming.
        if let Some((which, _)) = self.common.take() {
            self.shared.release(which, false, &mut self.pool);
        }
        sent
    }
}
