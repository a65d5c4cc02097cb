//! A worker's part of the relay: giver and taker joined, with the tenure to which their orders and reports refer.
//!
//! The caller carries out the actions that [`Worker::hear`] returns, in that order, and passes in no other input
//! before that is done (Y5).

use crate::giver;
use crate::table::{self, Refused, Row};
use crate::taker;
use crate::wire::{Order, Reason, Report, Standing};
use crate::{After, Party, Tenure};

/// Side of the relay on which a worker is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// It holds the lease.
    Giver(giver::State),
    /// It does not hold the lease.
    Taker(taker::State),
}

/// A worker's two tables.
#[derive(Debug, Clone)]
pub struct Tables {
    /// Table while it holds the lease.
    pub giver: Vec<Row<giver::State, giver::Event, giver::Action>>,
    /// Table while it does not hold the lease.
    pub taker: Vec<Row<taker::State, taker::Event, taker::Action>>,
}

impl Default for Tables {
    fn default() -> Self {
        Tables { giver: giver::TABLE.to_vec(), taker: taker::TABLE.to_vec() }
    }
}

/// Input of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Input {
    /// An order from the arbiter.
    Order(Order),
    /// Outcome of its compare-and-swap of the lease word.
    Swapped {
        /// Whether the swap succeeded.
        won: bool,
    },
    /// The lease word. The data path passes it in only if it has changed.
    Word(Tenure),
    /// The burst has ended, and the card is in the state that the method wants.
    Stopped,
    /// The card does not stop.
    Stuck(Reason),
    /// Everything is mapped and understood.
    Prepared,
    /// Something is missing or not understood.
    Unfit(Reason),
    /// The driver state is whole and true.
    Sound,
    /// The driver state is damaged or untrue.
    Broken(Reason),
}

/// Action of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Do {
    /// Map everything, and check kind and version of the driver state. Then [`Input::Prepared`] or [`Input::Unfit`].
    Map,
    /// End the burst, and have the card stop. Then [`Input::Stopped`] or [`Input::Stuck`].
    Stop,
    /// Go on driving.
    Resume,
    /// Write the driver state of this epoch.
    WriteDriverState {
        /// Epoch of the lease.
        epoch: u32,
    },
    /// Compare-and-swap of the lease word. Then [`Input::Swapped`].
    Swap {
        /// Tenure that the word must hold.
        from: Tenure,
        /// New tenure.
        to: Tenure,
    },
    /// Watch the lease word, and pass it in as [`Input::Word`] until the worker no longer waits for it.
    Look,
    /// Read the driver state. Then [`Input::Sound`] or [`Input::Broken`].
    Read {
        /// How the last driver ended.
        after: After,
        /// Epoch in which the driver state was written, if that driver passed the lease.
        wrote: u32,
    },
    /// Look at the rings once, even if no bell has rung.
    LookOnce,
    /// Drop the device without touching it.
    Yield,
    /// End.
    Go,
    /// Send a report to the arbiter.
    Say(Report),
}

/// A worker, as far as one device is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Worker {
    us: Party,
    side: Side,
    /// Tenure that it holds, or from which it is to take, or that it held last.
    tenure: Tenure,
    after: After,
    /// Epoch in which the driver state was written that it is to read.
    wrote: u32,
    reason: Reason,
}

impl Worker {
    /// Creates a worker that has just started.
    pub fn new(us: Party) -> Self {
        let (side, tenure) = (Side::Taker(taker::State::Idle), Tenure::free(0));
        Worker { us, side, tenure, after: After::Lost, wrote: 0, reason: Reason::Recalled }
    }

    /// Creates the first worker of a device, which took a free lease and started the card.
    pub fn first(us: Party, tenure: Tenure) -> Self {
        Worker { side: Side::Giver(giver::State::Driving), tenure, ..Worker::new(us) }
    }

    /// Returns the side on which the worker is.
    pub fn side(&self) -> Side {
        self.side
    }

    /// Returns whether the worker drives. Once a burst the data path checks only this and the count of messages.
    pub fn drives(&self) -> bool {
        self.side == Side::Giver(giver::State::Driving)
    }

    /// Returns whether the worker believes that it holds the lease.
    pub fn believes(&self) -> bool {
        use giver::State::{Driving, Passing, Stopping};
        match self.side {
            Side::Giver(state) => matches!(state, Driving | Stopping | Passing),
            Side::Taker(state) => matches!(state, taker::State::Reading | taker::State::Returning),
        }
    }

    /// Returns the worker's answer to an arbiter that asks for its identity.
    pub fn hello(&self) -> Report {
        use taker::State as T;
        let standing = match self.side {
            Side::Giver(giver::State::Out) => Standing::Unfit,
            Side::Giver(_) => Standing::Holding,
            Side::Taker(T::Idle | T::Preparing | T::Left) => Standing::Idle,
            Side::Taker(T::Ready) => Standing::Ready,
            Side::Taker(T::Waiting | T::Taking) => Standing::Waiting,
            Side::Taker(T::Reading | T::Driving) => Standing::Holding,
            Side::Taker(T::Returning | T::Failed) => Standing::Unfit,
        };
        Report::Hello { standing, epoch: self.tenure.epoch }
    }

    /// Returns the actions that follow from `input`. A refused input changes nothing. A void order is not refused;
    /// no action follows from it.
    pub fn hear(&mut self, tables: &Tables, input: Input) -> Result<Vec<Do>, Refused> {
        if input == Input::Order(Order::Who) {
            return Ok(vec![Do::Say(self.hello())]);
        }
        match self.side {
            Side::Giver(state) => match self.as_giver(state, input) {
                Some(event) => self.give(tables, state, event),
                None => Ok(Vec::new()),
            },
            Side::Taker(state) => match self.as_taker(state, input) {
                Some(event) => self.take(tables, state, event),
                None => Ok(Vec::new()),
            },
        }
    }

    fn as_giver(&mut self, state: giver::State, input: Input) -> Option<giver::Event> {
        use giver::Event;
        match input {
            // An order about another tenure is void (Y2).
            Input::Order(Order::Release { epoch } | Order::Recall { epoch }) if epoch != self.tenure.epoch => None,
            Input::Order(Order::Release { .. }) => Some(Event::Release),
            Input::Order(Order::Recall { .. }) => {
                self.reason = Reason::Recalled;
                Some(Event::Recall)
            }
            Input::Stopped => Some(Event::Stopped),
            Input::Stuck(reason) => {
                self.reason = reason;
                Some(Event::Stuck)
            }
            Input::Swapped { won: true } => Some(Event::Won),
            Input::Swapped { won: false } => Some(Event::Lost),
            Input::Word(now) if now != self.tenure && state != giver::State::Passing => Some(Event::Replaced),
            _ => None,
        }
    }

    fn as_taker(&mut self, state: taker::State, input: Input) -> Option<taker::Event> {
        use taker::Event;
        match input {
            Input::Order(Order::Prepare { .. }) => Some(Event::Prepare),
            Input::Order(Order::Take { epoch, after, wrote }) => {
                use taker::State::{Driving, Left, Reading, Returning, Taking};
                if !matches!(state, Taking | Reading | Returning | Driving | Left) {
                    (self.tenure, self.after, self.wrote) = (Tenure::free(epoch), after, wrote);
                }
                Some(Event::Take)
            }
            Input::Order(Order::StandDown) => Some(Event::StandDown),
            Input::Order(Order::Leave) => Some(Event::Leave),
            Input::Prepared => Some(Event::Prepared),
            Input::Unfit(reason) => {
                self.reason = reason;
                Some(Event::Unfit)
            }
            Input::Broken(reason) => {
                self.reason = reason;
                Some(Event::Broken)
            }
            Input::Sound => Some(Event::Sound),
            Input::Swapped { won: true } => Some(Event::Won),
            Input::Swapped { won: false } => Some(Event::Lost),
            Input::Word(now) if state == taker::State::Waiting => match now {
                now if now == self.tenure => Some(Event::Free),
                // The giver, or the arbiter, has not passed the lease yet.
                now if now.epoch == self.tenure.epoch => None,
                _ => Some(Event::Moved),
            },
            _ => None,
        }
    }

    fn give(&mut self, tables: &Tables, state: giver::State, event: giver::Event) -> Result<Vec<Do>, Refused> {
        use giver::Action;
        let (next, actions) = table::step(&tables.giver, state, event)?;
        let (tenure, epoch, reason) = (self.tenure, self.tenure.epoch, self.reason);
        self.side = match next {
            giver::State::Passed => Side::Taker(taker::State::Ready),
            other => Side::Giver(other),
        };
        let act = |action: &Action| match action {
            Action::Stop => Do::Stop,
            Action::Resume => Do::Resume,
            Action::WriteDriverState => Do::WriteDriverState { epoch },
            Action::Pass => Do::Swap { from: tenure, to: tenure.passed() },
            Action::Yield => Do::Yield,
            Action::SayReleased => Do::Say(Report::Released { epoch }),
            Action::SayKept => Do::Say(Report::Kept { epoch, reason }),
            Action::SayReplaced => Do::Say(Report::Replaced { epoch }),
        };
        Ok(actions.iter().map(act).collect())
    }

    fn take(&mut self, tables: &Tables, state: taker::State, event: taker::Event) -> Result<Vec<Do>, Refused> {
        use taker::Action;
        let (next, actions) = table::step(&tables.taker, state, event)?;
        if (state, event) == (taker::State::Taking, taker::Event::Won) {
            self.tenure = self.tenure.taken_by(self.us);
        }
        let (us, tenure, epoch, reason) = (self.us, self.tenure, self.tenure.epoch, self.reason);
        let (after, wrote) = (self.after, self.wrote);
        self.side = match next {
            taker::State::Driving => Side::Giver(giver::State::Driving),
            other => Side::Taker(other),
        };
        let act = |action: &Action| match action {
            Action::Map => Do::Map,
            Action::Look => Do::Look,
            Action::Take => Do::Swap { from: tenure, to: tenure.taken_by(us) },
            Action::Read => Do::Read { after, wrote },
            Action::LookOnce => Do::LookOnce,
            Action::Pass => Do::Swap { from: tenure, to: tenure.passed() },
            Action::Go => Do::Go,
            Action::SayReady => Do::Say(Report::Ready),
            Action::SayUnfit => Do::Say(Report::Unfit(reason)),
            Action::SayTaken => Do::Say(Report::Taken { epoch }),
            Action::SayLost => Do::Say(Report::Lost { epoch, ready: next == taker::State::Ready }),
            Action::SayFailed => Do::Say(Report::Failed { epoch, reason }),
        };
        Ok(actions.iter().map(act).collect())
    }
}
