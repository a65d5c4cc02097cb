//! The calls of a client that have no result yet, or whose result was not fetched.

use std::task::Waker;

use tasuki_shm::arena::Lent;
use tasuki_shm::ring::Message;
use tasuki_shm::slots::SlotId;

use super::{Failure, Reply};

/// The result of a call.
pub(crate) type Outcome = Result<Reply, Failure>;

/// Stage of a call.
#[derive(Debug)]
enum Stage {
    /// The place is free.
    Vacant,
    /// The server has the call.
    Waiting,
    /// The server has the call, but the client no longer wants the result.
    Abandoned,
    /// The result has arrived.
    Done(Outcome),
}

/// A place for one call.
#[derive(Debug)]
struct Place {
    /// Grows each time the place is reused, so that we recognise the answer to an earlier call.
    life: u32,
    stage: Stage,
    call: InFlight,
    waker: Option<Waker>,
}

/// The client's record of a call while the server has it.
#[derive(Debug, Default, Clone)]
pub(crate) struct InFlight {
    /// Slot that travelled with the request.
    pub slot: Option<Lent>,
    /// Index of the request in the request ring.
    pub index: u32,
    /// The request itself, if it may be sent again.
    pub again: Option<Message>,
}

/// The places for calls in flight, as many as the rings have entries.
#[derive(Debug)]
pub(crate) struct Pending {
    /// Created on first use: most clients have few calls in flight.
    places: Vec<Place>,
    vacant: Vec<u32>,
    capacity: u32,
}

/// The peer sent a call id that names no call in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the peer broke the call protocol: it answered call {call:#x}, which is not in flight")]
pub struct NoSuchCall {
    /// Call id that the peer sent.
    pub call: u64,
}

impl Pending {
    pub fn new(capacity: u32) -> Self {
        Pending { places: Vec::new(), vacant: Vec::new(), capacity }
    }

    #[inline]
    pub fn is_full(&self) -> bool {
        self.in_use() == self.capacity as usize
    }

    /// Returns the number of calls without a result, or with a result that was not fetched.
    #[inline]
    pub fn in_use(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    /// Returns the id of the next call, if there is room. [`begin`](Self::begin) then occupies its place.
    #[inline]
    pub fn next_id(&mut self) -> u64 {
        if self.vacant.is_empty() {
            self.vacant.push(u32::try_from(self.places.len()).expect("fewer places than a ring has lines"));
            self.places.push(Place { life: 0, stage: Stage::Vacant, call: InFlight::default(), waker: None });
        }
        let index = self.vacant[self.vacant.len() - 1];
        SlotId { index, generation: self.places[index as usize].life }.to_word()
    }

    /// Marks the call with the id [`next_id`](Self::next_id) as in flight.
    #[inline]
    pub fn begin(&mut self, slot: Option<Lent>, index: u32, again: Option<Message>) {
        let vacant = self.vacant.pop().expect("next_id found a vacant place");
        let place = &mut self.places[vacant as usize];
        place.stage = Stage::Waiting;
        place.call = InFlight { slot, index, again };
    }

    #[inline]
    fn place(&mut self, call: u64) -> Result<(u32, &mut Place), NoSuchCall> {
        let id = SlotId::from_word(call);
        match self.places.get_mut(id.index as usize) {
            Some(place) if place.life == id.generation => Ok((id.index, place)),
            _ => Err(NoSuchCall { call }),
        }
    }

    /// Takes the slot that travelled with a call in flight.
    #[inline]
    pub fn take_slot(&mut self, call: u64) -> Result<Option<Lent>, NoSuchCall> {
        match self.place(call)?.1 {
            Place { stage: Stage::Waiting | Stage::Abandoned, call, .. } => Ok(call.slot.take()),
            _ => Err(NoSuchCall { call }),
        }
    }

    /// Frees the place of an answered call whose caller has the answer. Returns the slot that travelled with it.
    #[inline(always)]
    pub fn complete(&mut self, call: u64) -> Result<Option<Lent>, NoSuchCall> {
        let (index, place) = self.place(call)?;
        if !matches!(place.stage, Stage::Waiting) {
            return Err(NoSuchCall { call });
        }
        let lent = place.call.slot.take();
        self.vacate(index);
        Ok(lent)
    }

    /// Stores the outcome of a call, and wakes its waker.
    #[inline]
    pub fn finish(&mut self, call: u64, outcome: Outcome) -> Result<(), NoSuchCall> {
        let (index, place) = self.place(call)?;
        match place.stage {
            Stage::Waiting => {
                place.stage = Stage::Done(outcome);
                if let Some(waker) = place.waker.take() {
                    waker.wake();
                }
            }
            Stage::Abandoned => self.vacate(index),
            Stage::Vacant | Stage::Done(_) => return Err(NoSuchCall { call }),
        }
        Ok(())
    }

    #[inline]
    fn vacate(&mut self, index: u32) {
        let place = &mut self.places[index as usize];
        place.life = place.life.wrapping_add(1);
        place.stage = Stage::Vacant;
        place.waker = None;
        self.vacant.push(index);
    }

    /// Whether the caller still waits for the outcome of this call.
    #[inline]
    pub fn is_wanted(&mut self, call: u64) -> bool {
        self.place(call).is_ok_and(|(_, place)| matches!(place.stage, Stage::Waiting | Stage::Done(_)))
    }

    /// Takes the outcome if it has arrived, and then frees the call's place.
    #[inline]
    pub fn take(&mut self, call: u64) -> Option<Outcome> {
        let (index, place) = self.place(call).ok()?;
        if !matches!(place.stage, Stage::Done(_)) {
            return None;
        }
        let Stage::Done(outcome) = std::mem::replace(&mut place.stage, Stage::Vacant) else {
            unreachable!("just looked")
        };
        self.vacate(index);
        Some(outcome)
    }

    #[cfg(feature = "tokio")]
    /// Wakes `waker` when the call has its outcome.
    pub fn wake_when_done(&mut self, call: u64, waker: &Waker) {
        if let Ok((_, place)) = self.place(call) {
            place.waker = Some(waker.clone());
        }
    }

    /// Wakes every waker, since nobody listens for results any more.
    #[cfg(feature = "tokio")]
    pub fn wake_all(&mut self) {
        self.places.iter_mut().filter_map(|place| place.waker.take()).for_each(Waker::wake);
    }

    /// Gives up a call: the client no longer wants its outcome.
    pub fn abandon(&mut self, call: u64) {
        if let Ok((index, place)) = self.place(call) {
            match place.stage {
                Stage::Waiting => place.stage = Stage::Abandoned,
                Stage::Done(_) => self.vacate(index),
                Stage::Vacant | Stage::Abandoned => {}
            }
        }
    }

    /// Returns every call that the server has.
    pub fn in_flight(&self) -> Vec<(u64, InFlight)> {
        let waiting =
            (0_u32..).zip(&self.places).filter(|(_, place)| matches!(place.stage, Stage::Waiting | Stage::Abandoned));
        waiting.map(|(index, place)| (u64::from(place.life) << 32 | u64::from(index), place.call.clone())).collect()
    }

    /// Records that the call was pushed again, at `index` of the request ring.
    pub fn moved(&mut self, call: u64, index: u32) {
        if let Ok((_, place)) = self.place(call) {
            place.call.index = index;
        }
    }
}
