//! The way of a frame into the guest's buffers.

use super::*;

/// Maximum number of buffers that one frame is merged from.
const MERGED_MAX: usize = 64;

/// Buffers of the guest for one frame.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Chains: the head of each, and its number of bytes.
    heads: ArrayVec<(Head, usize), MERGED_MAX>,
    pieces: ArrayVec<Piece, PIECES_MAX>,
}

/// Which of the rings by which the guest receives lack buffers.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// Bits of the pairs whose ring had no buffer for a frame in this turn.
    pub(super) rings: Pairs,
    /// Bits of the pairs whose driver was asked to kick when it posts a buffer.
    pub(super) kicks_on: Pairs,
    /// Since when a ring has had no buffer, for each of several pairs: frames for the others go on.
    pub(super) since: [Option<Instant>; PAIRS_MAX],
    /// The pair whose ring had no buffer last.
    pub(super) last: usize,
}

impl Guest {
    pub(super) fn give_to_guest(
        &mut self,
        incoming: &Incoming<'_>,
        front: &CheckedPrefix,
        dropped: &mut Dropped,
    ) -> Result<Given, Broken> {
        let (first, pairs) = self.front_end.as_ref().map_or((0, 0), |it| (it.device.first, it.device.pairs));
        let pair = first + if pairs < 2 { 0 } else { pair_of(incoming, pairs) };
        let too_long = dropped.too_long;
        let given = self.give_to_pair(pair, incoming, front, dropped)?;
        let (ring, counts) = (2 * pair + TO_GUEST, &mut self.counts);
        match given {
            Given::Taken(0) if pairs > 0 => {
                counts.add(ring, if dropped.too_long > too_long { Count::Length } else { Count::Other }, 1);
            }
            Given::Taken(count) => {
                counts.add(ring, Count::Packets, count as u64);
                counts.add(ring, Count::Bytes, if count > 0 { incoming.len() as u64 } else { 0 });
            }
            Given::NoRoom | Given::Later => self.shortage.last = pair,
        }
        if pairs < 2 {
            return Ok(given);
        }
        let short_since = &mut self.shortage.since[pair];
        match (given, *short_since) {
            (Given::NoRoom, None) => *short_since = Some(Instant::now()),
            // The bridge bounds how long a node's frames wait; here it is the ring that keeps those for others waiting.
            (Given::NoRoom, Some(since)) if since.elapsed() >= WAIT => {
                dropped.no_buffer += 1;
                self.counts.add(ring, Count::NoRoom, 1);
                return Ok(Given::Taken(0));
            }
            (Given::NoRoom, Some(_)) | (Given::Taken(0) | Given::Later, _) => {}
            (Given::Taken(_), _) => *short_since = None,
        }
        Ok(given)
    }

    #[inline]
    fn give_to_pair(
        &mut self,
        pair: usize,
        incoming: &Incoming<'_>,
        front: &CheckedPrefix,
        dropped: &mut Dropped,
    ) -> Result<Given, Broken> {
        let Self { front_end, copy, chain, room, shortage, .. } = self;
        let Some(front_end) = front_end else { return Ok(away(dropped)) };
        let offload = if incoming.is_finished() {
            Offload::default()
        } else {
            let Ok(offload) = incoming.offload() else { return Ok(too_late(dropped)) };
            let Some(offload) = sound(offload, incoming.len()).filter(|offload| incoming.spares(offload, front)) else {
                dropped.malformed += 1;
                return Ok(Given::Taken(0));
            };
            offload
        };
        if incoming.len() > front_end.device.longest() && offload.gso_type == GSO_NONE {
            dropped.too_long += 1;
            return Ok(Given::Taken(0));
        }
        let is_fit = takes(&front_end.device, &offload);
        let header = header_len(&front_end.device);
        let merges = front_end.device.has(feature::MRG_RXBUF);
        let Device { memory, queues, touched, .. } = &mut front_end.device;
        let Some(queue) = &mut queues[2 * pair + TO_GUEST] else { return Ok(away(dropped)) };
        *touched |= 1 << (2 * pair + TO_GUEST);
        let frame = Frame { incoming, front, offload: &offload };
        let given = match queue {
            Queue::Split(ring) if is_fit => Buffers { memory, ring, chain, room, header, merges }.give(frame, dropped),
            Queue::Packed(ring) if is_fit => Buffers { memory, ring, chain, room, header, merges }.give(frame, dropped),
            Queue::Split(ring) => Buffers { memory, ring, chain, room, header, merges }.cut(frame, copy, dropped),
            Queue::Packed(ring) => Buffers { memory, ring, chain, room, header, merges }.cut(frame, copy, dropped),
        }?;
        if given == Given::NoRoom {
            shortage.rings |= 1 << pair;
        }
        Ok(given)
    }
}

/// Returns the pair, of several, by which the guest gets a frame.
fn pair_of(incoming: &Incoming<'_>, pairs: usize) -> usize {
    let mut front = [0; flow::FLOW_PREFIX];
    let len = incoming.copy_front(&mut front);
    flow_of(&front[..len]) as usize % pairs
}

pub(super) fn away(dropped: &mut Dropped) -> Given {
    dropped.away += 1;
    Given::Taken(0)
}

fn too_late(dropped: &mut Dropped) -> Given {
    dropped.too_late += 1;
    Given::Taken(0)
}

/// Returns the header of a frame that one buffer holds, and the frame's addresses behind it, little-endian.
#[inline]
fn words_of(offload: &Offload, addresses: Addresses) -> [u64; 3] {
    let Offload { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset } = *offload;
    let [hdr_len, gso_size, csum_start, csum_offset] =
        [hdr_len, gso_size, csum_start, csum_offset].map(|field| u64::from(field.get()));
    let Addresses { first, rest } = addresses;
    let buffers = 1;
    let words = [
        u64::from(flags) | u64::from(gso_type) << 8 | hdr_len << 16 | gso_size << 32 | csum_start << 48,
        csum_offset | buffers << 16 | first << 32,
        first >> 32 | u64::from(rest) << 32,
    ];
    words.map(u64::to_le)
}

/// Returns the length in bytes of the header before each frame.
pub(super) fn header_len(device: &Device) -> usize {
    let is_long = device.has(feature::VERSION_1) || device.has(feature::MRG_RXBUF);
    if is_long { LONG_HEADER } else { HEADER_LEN }
}

/// Returns a copy of the header with only the fields that the guest's driver needs. Returns `None` if a field contradicts
/// the frame of `len` bytes: another node may have written anything.
fn sound(offload: Offload, len: usize) -> Option<Offload> {
    const DATA_VALID: u8 = 2;
    let Offload { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset } = offload;
    let mut sound = Offload { flags: flags & (NEEDS_CSUM | DATA_VALID), gso_type, ..Offload::default() };
    if flags & NEEDS_CSUM != 0 {
        let (start, offset) = (usize::from(csum_start.get()), usize::from(csum_offset.get()));
        (start >= 14 && start + offset + 2 <= len).then_some(())?;
        (sound.csum_start, sound.csum_offset) = (csum_start, csum_offset);
    }
    if gso_type != GSO_NONE {
        let is_known = matches!(gso_type & !GSO_ECN, GSO_TCPV4 | GSO_TCPV6 | GSO_UDP_L4);
        let fits = gso_size.get() > 0 && usize::from(hdr_len.get()) <= len && flags & NEEDS_CSUM != 0;
        (is_known && fits).then_some(())?;
        (sound.hdr_len, sound.gso_size) = (hdr_len, gso_size);
    }
    Some(sound)
}

/// Returns whether the guest's driver takes a frame with this work left to do.
fn takes(device: &Device, offload: &Offload) -> bool {
    let needs_csum = offload.flags & NEEDS_CSUM != 0;
    let cuts = match offload.gso_type & !GSO_ECN {
        GSO_NONE => true,
        GSO_TCPV4 => device.has(feature::GUEST_TSO4),
        GSO_TCPV6 => device.has(feature::GUEST_TSO6),
        GSO_UDP_L4 => device.has(feature::GUEST_USO4) && device.has(feature::GUEST_USO6),
        _ => false,
    };
    (!needs_csum || device.has(feature::GUEST_CSUM))
        && cuts
        && (offload.gso_type & GSO_ECN == 0 || device.has(feature::GUEST_ECN))
}

/// Whether the guest has buffers for a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Room,
    /// It has none at present.
    None,
    /// So many were filled in this turn that the frame has to wait for the next.
    Later,
    /// No buffer, or no number of merged ones, holds the frame.
    TooLong,
}

/// What became of a frame for one buffer.
enum Plain {
    Given,
    /// Its sender took it back while it was copied.
    TakenBack,
    /// No single buffer holds it.
    DoesNotFit,
}

impl Found {
    fn given(self, dropped: &mut Dropped) -> Given {
        match self {
            Found::None => Given::NoRoom,
            Found::Later => Given::Later,
            Found::Room | Found::TooLong => {
                dropped.too_long += 1;
                Given::Taken(0)
            }
        }
    }
}

/// A frame for the guest.
#[derive(Clone, Copy)]
struct Frame<'a> {
    incoming: &'a Incoming<'a>,
    /// The bytes at its beginning that were checked; the sender may have changed its copy since.
    front: &'a CheckedPrefix,
    offload: &'a Offload,
}

/// The ring by which the guest receives, and the buffers of it that one frame takes.
struct Buffers<'a, R> {
    memory: &'a DriverMemory,
    ring: &'a mut R,
    chain: &'a mut Chain,
    room: &'a mut Room,
    header: usize,
    merges: bool,
}

impl<R: Ring> Buffers<'_, R> {
    /// Gives a frame as it is.
    #[inline]
    fn give(&mut self, frame: Frame<'_>, dropped: &mut Dropped) -> Result<Given, Broken> {
        if let Some(address) = self.ring.address_ahead(AHEAD) {
            self.memory.prefetch_to_write(address, FETCHED);
        }
        match self.give_plain(frame)? {
            Plain::Given => return Ok(Given::Taken(1)),
            Plain::TakenBack => return Ok(too_late(dropped)),
            Plain::DoesNotFit => {}
        }
        let Frame { incoming, front, offload } = frame;
        let (header, len) = (self.header, incoming.len());
        let found = self.find(header + len)?;
        if found != Found::Room {
            return Ok(found.given(dropped));
        }
        self.write_header(offload);
        self.write(header, len, |at, len, region, offset| incoming.copy_to_common(at, len, region, offset));
        self.write(header, front.len(), |at, len, region, offset| region.copy_from(offset, &front[at..at + len]));
        if !incoming.is_whole() {
            self.put_back();
            return Ok(too_late(dropped));
        }
        self.complete(header + len);
        Ok(Given::Taken(1))
    }

    /// Gives a frame that the guest's driver does not take as it is: finished, or cut into several.
    fn cut(&mut self, frame: Frame<'_>, copy: &mut [u8], dropped: &mut Dropped) -> Result<Given, Broken> {
        let Frame { incoming, front, offload } = frame;
        let Ok(len) = incoming.copy_to(copy) else { return Ok(too_late(dropped)) };
        copy[..front.len()].copy_from_slice(front);
        let (before, header) = (self.ring.state(), self.header);
        let (mut count, mut failed) = (0, None);
        let made = finish(offload, &mut copy[..len], |front, back| {
            if failed.is_some() {
                return;
            }
            let all = front.len() + back.len();
            match self.find(header + all) {
                Ok(Found::Room) => {}
                Ok(found) => return failed = Some(Ok(found)),
                Err(broken) => return failed = Some(Err(broken)),
            }
            self.write_header(&Offload::default());
            self.write(header, front.len(), |at, len, region, offset| region.copy_from(offset, &front[at..at + len]));
            self.write(header + front.len(), back.len(), |at, len, region, offset| {
                region.copy_from(offset, &back[at..at + len])
            });
            self.complete(header + all);
            count += 1;
        });
        match (made, failed) {
            (Ok(_), None) => Ok(Given::Taken(count)),
            (_, Some(Err(broken))) => Err(broken),
            (Err(_), _) => {
                dropped.malformed += 1;
                Ok(Given::Taken(0))
            }
            (Ok(_), Some(Ok(found))) => {
                // All parts go, or none: those that went are not shown yet.
                self.ring.rewind(before);
                let has_whole_turn = self.ring.left() >= COMPLETIONS_MAX;
                Ok(if found == Found::Later && has_whole_turn { Found::TooLong } else { found }.given(dropped))
            }
        }
    }

    /// Gives a frame that the next buffer holds alone, as nearly all do.
    #[inline]
    fn give_plain(&mut self, frame: Frame<'_>) -> Result<Plain, Broken> {
        let Frame { incoming, front, offload } = frame;
        let len = LONG_HEADER + incoming.len();
        let Some(addresses) = Addresses::of(front).filter(|_| self.header == LONG_HEADER) else {
            return Ok(Plain::DoesNotFit);
        };
        let Some((head, piece)) = self.ring.next_plain(self.memory, len)? else { return Ok(Plain::DoesNotFit) };
        let (region, at) = self.memory.place_of(piece);
        let put = incoming.copy_to_common(0, incoming.len(), region, at + LONG_HEADER);
        put.and_then(|()| region.put_words(at, words_of(offload, addresses))).expect("the piece was checked");
        if !incoming.is_whole() {
            return Ok(Plain::TakenBack);
        }
        self.memory.note(piece, len);
        self.ring.complete_next(head, u32::try_from(len).expect("no longer than a frame"));
        Ok(Plain::Given)
    }

    /// Takes buffers for `len` bytes. Takes none if they are too few.
    #[inline]
    fn find(&mut self, len: usize) -> Result<Found, Broken> {
        self.room.heads.clear();
        self.room.pieces.clear();
        let mut have = 0;
        let found = loop {
            if have >= len {
                return Ok(Found::Room);
            }
            if !self.ring.take(self.memory, self.chain)? {
                let all = self.room.heads.len() == usize::from(self.ring.size());
                break match self.ring.left() {
                    0 => Found::Later,
                    _ if all => Found::TooLong,
                    _ => Found::None,
                };
            }
            let (head, room) = (self.chain.head, len_of(&self.chain.writable));
            if self.room.heads.try_push((head, room)).is_err() {
                self.ring.put_back(head);
                break Found::TooLong;
            }
            have += room;
            let fits = self.room.pieces.try_extend_from_slice(&self.chain.writable).is_ok();
            if !fits || (!self.merges && have < len) {
                break Found::TooLong;
            }
        };
        self.put_back();
        Ok(found)
    }

    /// Puts the buffers back.
    fn put_back(&mut self) {
        self.room.heads.drain(..).rev().for_each(|(head, _)| self.ring.put_back(head));
    }

    #[inline]
    fn write_header(&mut self, offload: &Offload) {
        let mut header = [0; LONG_HEADER];
        header[..HEADER_LEN].copy_from_slice(offload.as_bytes());
        let buffers = u16::try_from(self.room.heads.len()).expect("a few");
        header[HEADER_LEN..].copy_from_slice(&buffers.to_le_bytes());
        self.write(0, self.header, |at, len, region, offset| region.copy_from(offset, &header[at..at + len]));
    }

    #[inline]
    fn write(
        &self,
        from: usize,
        len: usize,
        copy: impl FnMut(usize, usize, &CommonRegion, usize) -> Result<(), RegionError>,
    ) {
        self.memory.fill(&self.room.pieces, from, len, copy);
    }

    /// Completes the buffers, which hold `len` bytes.
    #[inline]
    fn complete(&mut self, len: usize) {
        let mut left = len;
        for (head, room) in self.room.heads.drain(..) {
            let part = room.min(left);
            left -= part;
            self.ring.complete(head, u32::try_from(part).expect("no longer than a frame"));
        }
    }
}
