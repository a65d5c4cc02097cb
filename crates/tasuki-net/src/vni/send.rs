//! Sends frames.

use tasuki_shm::pool::{LINE, PAGE, Piece, Run};
use tasuki_shm::region::PAGE_LEN;
use tasuki_shm::ring::Message;

use super::inbox::Breach;
use super::ledger::point;
use super::neighbour::{Announcement, name_of};
use super::offload::HEADER_LEN;
use super::outbox::{NoRoom, SharedRun, Stock, WITH_HEADER, run_pages};
use super::{BESIDE, PIECE_MAX, Vni};

/// Number of pages taken at a time for frames whose destination is not known yet.
const STAGED_PAGES: u32 = 64;

/// Why a frame was not sent to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// This end knows no node of that number.
    #[error("there is no node {0} on this VNI")]
    NoSuchNode(u16),
    /// A frame cannot have this length.
    #[error("a frame of {len} bytes was to be sent, and a frame has 14 to {} bytes", PIECE_MAX - HEADER_LEN)]
    Length {
        /// Length of the frame in bytes.
        len: usize,
    },
    /// There is no room for the frame.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The node broke a rule; this end no longer sends to it.
    #[error("the node broke a rule and is not sent to any more: {0}")]
    Broken(Breach),
}

impl Vni {
    /// Makes room for a frame of `len` bytes to node `to`, to be filled and then [posted](Self::post). Another draft
    /// replaces it. Bytes that the caller does not write keep their old contents.
    #[inline]
    pub fn draft(&mut self, to: u16, len: usize) -> Result<&mut [u8], SendError> {
        let piece = u32::try_from(len).unwrap_or(u32::MAX);
        if !(14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        if !self.has_room(to, piece)? {
            // Other nodes may have read frames since the last check.
            self.reap();
            if !self.has_room(to, piece)? {
                return Err(NoRoom::Pool.into());
            }
        }
        let neighbour = self.neighbours[usize::from(to)].as_mut().expect("just seen");
        Ok(neighbour.outbox.drafted(piece, &mut self.pool))
    }

    /// Makes room for a piece to node `to`. Returns false if the pool has none.
    #[inline]
    fn has_room(&mut self, to: u16, piece: u32) -> Result<bool, SendError> {
        let neighbour = self.neighbours.get_mut(usize::from(to)).and_then(Option::as_mut);
        let Some(neighbour) = neighbour else { return Err(SendError::NoSuchNode(to)) };
        if let Some(breach) = neighbour.breach {
            return Err(SendError::Broken(breach));
        }
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        match neighbour.outbox.draft(piece, &mut stock) {
            Ok(Ok(())) => Ok(true),
            Ok(Err(NoRoom::Pool)) => Ok(false),
            Ok(Err(none)) => Err(none.into()),
            Err(broken) => Err(SendError::Broken(neighbour.breaks(broken.into()))),
        }
    }

    /// Counts a frame to node `to` that is dropped since there was no room. A frame that waits is tried again, and not
    /// counted.
    #[cold]
    pub fn count_dropped(&mut self, to: u16, none: NoRoom) {
        if let Some(neighbour) = self.neighbours.get_mut(usize::from(to)).and_then(Option::as_mut) {
            neighbour.count_dropped(none);
        }
    }

    /// Sends the first `len` bytes of the last draft for node `to`. The node sees them after the next
    /// [`flush`](Self::flush), or sooner.
    ///
    /// # Panics
    /// Without a draft for the node, or if the draft was shorter.
    #[inline]
    pub fn post(&mut self, to: u16, len: usize, with_header: bool) {
        let neighbour = self.neighbours[usize::from(to)].as_mut().expect("there was a draft for it");
        let flags = if with_header { WITH_HEADER } else { 0 };
        let len = u32::try_from(len).expect("no longer than the draft");
        if let Some(captures) = &mut self.captures {
            captures.sent(without_header(neighbour.outbox.drafted(len, &mut self.pool), with_header));
        }
        neighbour.announce(&self.node_memory, to);
        neighbour.outbox.post(len, flags, &self.pool);
        neighbour.count_sent(&mut self.touched, to);
    }

    /// Takes back from all nodes what they have read.
    #[cold]
    fn reap(&mut self) {
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        for neighbour in self.neighbours.iter_mut().flatten().filter(|neighbour| neighbour.outbox.holds()) {
            if let Err(broken) = neighbour.outbox.behind(&mut stock) {
                neighbour.breaks(broken.into());
            }
        }
    }

    /// Makes room for the longest frame with its offload header, to be filled before its destination is known, and then
    /// [posted](Self::post_staged). Returns `None` if the pool has fewer pages left than that takes.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "17")]
    pub fn stage(&mut self) -> Option<&mut [u8]> {
        const PAGES: u32 = (PIECE_MAX + BESIDE).div_ceil(PAGE_LEN) as u32;
        if self.staging.as_ref().is_none_or(|run| run.pages() < PAGES) {
            if let Some(run) = self.staging.take() {
                self.pool.give(run);
            }
            // Leave some pages for frames that were staged before.
            let pages = (self.pool.left() / 4).clamp(PAGES, STAGED_PAGES);
            self.staging = self.pool.take(pages).or_else(|| self.pool.take(PAGES));
            if self.staging.is_none() {
                self.reap();
                self.staging = self.pool.take(PAGES);
            }
        }
        self.aside.is_used = self.staging.is_none() && self.pool.left() >= PAGES;
        (self.staging.is_some() || self.aside.is_used).then(|| self.staged_mut())
    }

    /// Returns the room that [`stage`](Self::stage) made last, with [`BESIDE`] bytes behind it.
    ///
    /// # Panics
    /// If there is none.
    #[inline]
    pub(crate) fn staged_mut(&mut self) -> &mut [u8] {
        match &self.staging {
            Some(run) if !self.aside.is_used => {
                let len = (PIECE_MAX + BESIDE).min(run.pages() as usize * PAGE_LEN);
                self.pool.bytes_mut(run, 0, len)
            }
            _ => self.aside.bytes_mut(),
        }
    }

    /// Returns the first page of the room that was staged last, if it lies in the pool.
    #[inline]
    pub(crate) fn staging_page(&self) -> Option<u32> {
        self.staging.as_ref().filter(|_| !self.aside.is_used).map(Run::first)
    }

    /// Returns a copy of `len` bytes from this page of the pool on; a predecessor may have written them.
    pub(crate) fn left_at(&mut self, page: u32, len: usize) -> Option<Vec<u8>> {
        (len <= PIECE_MAX + BESIDE).then(|| self.pool.copy_of(page, len)).flatten()
    }

    /// Takes the pages on which a predecessor may have left `len` bytes, as far as they are free, so that nothing is written there.
    pub(crate) fn keep_left(&mut self, page: u32, len: usize, kept: &mut Vec<Run>) {
        let pages = u32::try_from(len).map_or(0, |len| len.div_ceil(PAGE));
        kept.extend((page..page.saturating_add(pages)).filter_map(|page| self.pool.take_at(page, 1)));
    }

    /// Gives pages back that were [kept](Self::keep_left).
    pub(crate) fn give_left(&mut self, kept: Vec<Run>) {
        kept.into_iter().for_each(|run| self.pool.give(run));
    }

    /// Sends the first `len` staged bytes, a frame behind an offload header, to node `to`. If there is no room, the
    /// frame stays staged.
    #[inline]
    pub fn post_staged(&mut self, to: u16, len: usize) -> Result<(), SendError> {
        if !(HEADER_LEN + 14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        if self.aside.is_used {
            return self.post_aside(to, len);
        }
        let neighbour = self.neighbours.get_mut(usize::from(to)).and_then(Option::as_mut);
        let Some(neighbour) = neighbour else { return Err(SendError::NoSuchNode(to)) };
        if let Some(breach) = neighbour.breach {
            return Err(SendError::Broken(breach));
        }
        let bytes = u32::try_from(len).expect("no longer than the longest");
        let pages = bytes.div_ceil(PAGE);
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        match neighbour.outbox.takes(pages, &mut stock) {
            Ok(Ok(())) => {
                let Some(mut run) = self.staging.take() else { return Err(NoRoom::Pool.into()) };
                self.staging = (pages < run.pages()).then(|| stock.pool.split(&mut run, pages));
                if let Some(captures) = &mut self.captures {
                    captures.sent(without_header(stock.pool.bytes_mut(&run, 0, len), true));
                }
                neighbour.announce(&self.node_memory, to);
                neighbour.outbox.post_run(run, bytes, WITH_HEADER, &mut stock);
                neighbour.count_sent(&mut self.touched, to);
                Ok(())
            }
            Ok(Err(none)) => Err(none.into()),
            Err(broken) => Err(SendError::Broken(neighbour.breaks(broken.into()))),
        }
    }

    /// Sends the first `len` staged bytes to all these nodes. Returns the number of nodes that got the frame, which is an error
    /// only if none did for want of room.
    pub fn post_staged_to_all(&mut self, nodes: impl IntoIterator<Item = u16>, len: usize) -> Result<usize, SendError> {
        if !(HEADER_LEN + 14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        if self.aside.is_used {
            return self.post_aside_to_all(nodes, len);
        }
        let Some(mut run) = self.staging.take() else { return Err(NoRoom::Pool.into()) };
        let bytes = u32::try_from(len).expect("no longer than the longest");
        let pages = bytes.div_ceil(PAGE);
        self.staging = (pages < run.pages()).then(|| self.pool.split(&mut run, pages));
        if let Some(captures) = &mut self.captures {
            captures.sent(without_header(self.pool.bytes_mut(&run, 0, len), true));
        }
        let piece = self.pool.piece(&run, 0, bytes);
        let which = self.shared.add(run);
        let sent = self.share(nodes, piece, which, WITH_HEADER);
        self.shared.release(which, false, &mut self.pool);
        Ok(sent?)
    }

    /// Sends a frame of `len` bytes, which `fill` writes, to all these nodes. Returns the number of nodes that got it, which is
    /// an error only if none did for want of room; for each of the others, counts why it did not.
    pub fn send_to_all(
        &mut self,
        nodes: impl IntoIterator<Item = u16>,
        len: usize,
        with_header: bool,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<usize, SendError> {
        if !(14..=PIECE_MAX).contains(&len) {
            return Err(SendError::Length { len });
        }
        let bytes = u32::try_from(len).expect("no longer than the longest");
        let Some((which, at)) = self.common_room(bytes) else { return Err(NoRoom::Pool.into()) };
        let run = self.shared.run(which);
        let frame = self.pool.bytes_mut(run, at as usize, len);
        fill(frame);
        if let Some(captures) = &mut self.captures {
            captures.sent(without_header(frame, with_header));
        }
        let piece = self.pool.piece(run, at, bytes);
        let flags = if with_header { WITH_HEADER } else { 0 };
        Ok(self.share(nodes, piece, which, flags)?)
    }

    /// Sends a piece to all these nodes. Returns the number of nodes that got it, or why one of them did not if that lacked
    /// room and none did.
    fn share(
        &mut self,
        nodes: impl IntoIterator<Item = u16>,
        piece: Piece,
        which: SharedRun,
        flags: u32,
    ) -> Result<usize, NoRoom> {
        let mut stock = Stock { pool: &mut self.pool, shared: &mut self.shared, quota: self.quota };
        let (mut count, mut lacked) = (0, None);
        for to in nodes {
            let Some(neighbour) = self.neighbours.get_mut(usize::from(to)).and_then(Option::as_mut) else { continue };
            if neighbour.breach.is_some() {
                continue;
            }
            neighbour.announce(&self.node_memory, to);
            match neighbour.outbox.share(piece, which, flags, &mut stock) {
                Ok(Ok(())) => {
                    count += 1;
                    neighbour.count_sent(&mut self.touched, to);
                }
                Ok(Err(none)) => {
                    neighbour.count_dropped(none);
                    lacked = Some(none);
                }
                Err(broken) => {
                    neighbour.breaks(broken.into());
                }
            }
        }
        lacked.filter(|_| count == 0).map_or(Ok(count), Err)
    }

    /// Makes room for a frame to several nodes, behind the earlier ones.
    fn common_room(&mut self, len: u32) -> Option<(SharedRun, u32)> {
        if let Some((which, at)) = &mut self.common {
            let place = *at;
            if place + len <= self.shared.run(*which).pages() * PAGE {
                *at += len.next_multiple_of(LINE);
                return Some((*which, place));
            }
            self.shared.release(*which, false, &mut self.pool);
            self.common = None;
        }
        let least = len.div_ceil(PAGE);
        let mut run = self.pool.take(run_pages(self.pool.left()).max(least)).or_else(|| self.pool.take(least));
        if run.is_none() {
            self.reap();
            run = self.pool.take(least);
        }
        let run = run?;
        let which = self.shared.add(run);
        self.common = Some((which, len.next_multiple_of(LINE)));
        Some((which, 0))
    }

    /// Copies a frame of at least 14 bytes to node `to`.
    #[inline]
    pub fn send(&mut self, to: u16, frame: &[u8]) -> Result<(), SendError> {
        match self.draft(to, frame.len()) {
            Ok(room) => room.copy_from_slice(frame),
            Err(error) => {
                if let SendError::NoRoom(none) = error {
                    self.count_dropped(to, none);
                }
                return Err(error);
            }
        }
        self.post(to, frame.len(), false);
        Ok(())
    }

    /// Returns the staged messages, each with its node and its place in the ring to that node.
    pub(crate) fn staged(&self) -> impl Iterator<Item = (u16, u32, &Message<1>)> {
        let touched = self.touched.iter().filter_map(|to| Some((*to, self.neighbours[usize::from(*to)].as_ref()?)));
        touched.flat_map(|(to, it)| it.outbox.staged().map(move |(index, message)| (to, index, message)))
    }

    /// Drops what was posted since the last [`flush`](Self::flush), as far as it was no more than a batch for each
    /// node.
    pub(super) fn withdraw(&mut self) {
        for to in &self.touched {
            if let Some(neighbour) = self.neighbours[usize::from(*to)].as_mut() {
                neighbour.counts.sent -= neighbour.outbox.withdraw() as u64;
            }
        }
    }

    /// Publishes the posted frames, and wakes the nodes that sleep and were sent some.
    #[inline]
    pub fn flush(&mut self) {
        self.flush_with(|| ());
    }

    /// Like [`flush`](Self::flush). Calls `published` when all frames are published, before it rings any bell: ringing
    /// takes system calls, in which a kill is most likely.
    #[inline]
    pub(crate) fn flush_with(&mut self, published: impl FnOnce()) {
        for to in &self.touched {
            let Some(neighbour) = self.neighbours[usize::from(*to)].as_mut() else { continue };
            point("vni.publishing");
            neighbour.outbox.publish();
        }
        published();
        for to in self.touched.drain(..) {
            let Some(neighbour) = self.neighbours[usize::from(to)].as_mut() else { continue };
            neighbour.touched = false;
            // V2: a node that hears of us for the first time must learn our number.
            let is_new = std::mem::replace(&mut neighbour.announcement, Announcement::Known) != Announcement::Known;
            if neighbour.outbox.peer_bell.must_ring() || is_new {
                neighbour.bell_sender.ring_as(&name_of(self.number));
            }
            neighbour.publish();
        }
        if let Some(captures) = &mut self.captures {
            captures.flush();
        }
    }
}

/// Returns the frame, without its offload header if it has one.
fn without_header(piece: &[u8], with_header: bool) -> &[u8] {
    if with_header { &piece[HEADER_LEN..] } else { piece }
}
