//! The side that holds the lease: a worker that drives a device until it is ordered to release it.
//!
//! Once a burst its data path checks whether a release was ordered, by one load of a word beside the lease that
//! names the epoch to release. Then follow [`Action::WriteDriverState`] (in place: the cursors) and [`Action::Pass`]
//! (one compare-and-swap).

use crate::table::{Row, Then::*, listed};

listed! {
    /// State of a giver.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum State {
        /// It holds the lease and drives the device.
        Driving,
        /// It ends its burst, and has the card stop where the method wants that.
        Stopping,
        /// It has stopped, and passes the lease.
        Passing,
        /// It has passed the lease. From here on it is a taker that is ready.
        Passed,
        /// It was replaced, and no longer touches the device.
        Out,
    }
}

listed! {
    /// Event at a giver.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Event {
        /// The arbiter orders it to release the epoch that it holds.
        Release,
        /// The arbiter takes that order back.
        Recall,
        /// The burst has ended and the card is in the state that the method wants.
        Stopped,
        /// The card does not stop.
        Stuck,
        /// Its compare-and-swap succeeded.
        Won,
        /// Its compare-and-swap failed.
        Lost,
        /// The lease word names another epoch than its own.
        Replaced,
    }
}

/// Action of a giver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// End the burst; have the card stop where the method wants that.
    Stop,
    /// Go on driving, from the pending frames.
    Resume,
    /// Write the cursors to the driver state.
    WriteDriverState,
    /// Compare-and-swap: from its own tenure to a free lease.
    Pass,
    /// Drop the device without touching it.
    Yield,
    /// Tell the arbiter that it has passed the lease.
    SayReleased,
    /// Tell the arbiter that it keeps the lease, and why.
    SayKept,
    /// Tell the arbiter that it was replaced.
    SayReplaced,
}

/// The giver's table.
#[rustfmt::skip]
pub const TABLE: &[Row<State, Event, Action>] = {
    use Action::*;
    use Event::*;
    use State::*;
    const ENDED: &[State] = &[Passed, Out];
    const OVER: &str = "a worker that has let go is a taker or nothing, and has another table";
    const FIRST: &str = "a row is carried out before the next event is heard (Y5)";
    const NO_SWAP: &str = "it has tried none";
    &[
        Row { from: &[Driving], on: Release, then: Go(Stopping, &[Stop]), because: "nobody else may begin while a burst is under way" },
        Row { from: &[Stopping], on: Release, then: Stay(&[]), because: "it is about to" },
        Row { from: &[Passing], on: Release, then: Refuse, because: FIRST },
        Row { from: ENDED, on: Release, then: Refuse, because: OVER },
        Row { from: &[Driving], on: Recall, then: Stay(&[SayKept]), because: "the order never came, or the card did not stop; the arbiter waits for a word" },
        Row { from: &[Stopping], on: Recall, then: Go(Driving, &[Resume, SayKept]), because: "nobody else has begun: it still holds the lease" },
        Row { from: &[Passing], on: Recall, then: Refuse, because: FIRST },
        Row { from: ENDED, on: Recall, then: Refuse, because: "a pass is final; only an order to take brings the lease back" },
        Row { from: &[Stopping], on: Stopped, then: Go(Passing, &[WriteDriverState, Pass]), because: "the driver state must be true before anybody can win the lease (Y4)" },
        Row { from: &[Driving, Passing], on: Stopped, then: Refuse, because: "it was not stopping" },
        Row { from: ENDED, on: Stopped, then: Refuse, because: OVER },
        Row { from: &[Stopping], on: Stuck, then: Go(Driving, &[Resume, SayKept]), because: "a card that will not stop stays where it is" },
        Row { from: &[Driving, Passing], on: Stuck, then: Refuse, because: "it was not stopping" },
        Row { from: ENDED, on: Stuck, then: Refuse, because: OVER },
        Row { from: &[Passing], on: Won, then: Go(Passed, &[SayReleased]), because: "from now on the word alone names the driver (Y1)" },
        Row { from: &[Driving, Stopping], on: Won, then: Refuse, because: NO_SWAP },
        Row { from: ENDED, on: Won, then: Refuse, because: OVER },
        Row { from: &[Passing], on: Lost, then: Go(Out, &[Yield, SayReplaced]), because: "it was fenced and replaced while it stopped" },
        Row { from: &[Driving, Stopping], on: Lost, then: Refuse, because: NO_SWAP },
        Row { from: ENDED, on: Lost, then: Refuse, because: OVER },
        Row { from: &[Driving, Stopping], on: Replaced, then: Go(Out, &[Yield, SayReplaced]), because: "it was silent for too long: fenced, and another has the lease" },
        Row { from: &[Passing], on: Replaced, then: Refuse, because: FIRST },
        Row { from: ENDED, on: Replaced, then: Refuse, because: OVER },
    ]
};
