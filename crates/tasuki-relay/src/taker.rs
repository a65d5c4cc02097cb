//! The side that is to hold the lease: a new worker, a stand-by, another node's worker, or a giver that is to take
//! the lease back.
//!
//! While it waits it reads one word, the lease word: it spins if it has a core of its own, and sleeps if it shares
//! the giver's.

use crate::table::{Row, Then::*, listed};

listed! {
    /// State of a taker.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum State {
        /// It has started and has received no order.
        Idle,
        /// It maps the memory and the registers, and checks that it reads the driver state's kind and version.
        Preparing,
        /// It could go on at once.
        Ready,
        /// It was ordered to take, and waits until the lease word is the word that the order named.
        Waiting,
        /// It has tried the compare-and-swap.
        Taking,
        /// It holds the lease, and reads the driver state.
        Reading,
        /// It drives. From here on it is a giver.
        Driving,
        /// It cannot go on from the driver state, and passes the lease back.
        Returning,
        /// It cannot take this device.
        Failed,
        /// It was ordered to leave.
        Left,
    }
}

listed! {
    /// Event at a taker.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Event {
        /// The arbiter orders it to prepare.
        Prepare,
        /// Everything is mapped and understood.
        Prepared,
        /// Something is missing or not understood.
        Unfit,
        /// The arbiter orders it to take the lease from a certain word.
        Take,
        /// The lease word is that word.
        Free,
        /// The lease word is neither that word nor the one before it.
        Moved,
        /// Its compare-and-swap succeeded.
        Won,
        /// Its compare-and-swap failed.
        Lost,
        /// The driver state is whole and matches the card.
        Sound,
        /// The driver state is damaged or does not match the card.
        Broken,
        /// The arbiter orders it to stop waiting.
        StandDown,
        /// The arbiter needs it no more.
        Leave,
    }
}

/// Action of a taker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Map everything, and check kind and version of the driver state.
    Map,
    /// Watch the lease word until it is the word that the order named, or has moved on.
    Look,
    /// Compare-and-swap: from the word that the order named to its own tenure.
    Take,
    /// Read and check the driver state, or the rings if the last driver was lost.
    Read,
    /// Look at the rings once, even if no bell has rung.
    LookOnce,
    /// Compare-and-swap: from its own tenure to a free lease.
    Pass,
    /// End.
    Go,
    /// Tell the arbiter that it could go on at once.
    SayReady,
    /// Tell the arbiter that it cannot take this device, and why.
    SayUnfit,
    /// Tell the arbiter that it drives.
    SayTaken,
    /// Tell the arbiter that it waits for no lease any more.
    SayLost,
    /// Tell the arbiter that it has held the lease and given it back, and why.
    SayFailed,
}

/// The taker's table.
#[rustfmt::skip]
pub const TABLE: &[Row<State, Event, Action>] = {
    use Action as A;
    use Event as E;
    use State::*;
    const OVER: &str = "its part is over";
    const FIRST: &str = "a row is carried out before the next event is heard (Y5)";
    const BUSY: &[State] = &[Taking, Reading, Returning];
    &[
        Row { from: &[Idle], on: E::Prepare, then: Go(Preparing, &[A::Map]), because: "all that takes time is done while the giver drives" },
        Row { from: &[Preparing, Waiting], on: E::Prepare, then: Stay(&[]), because: "it does so already, or has done it" },
        Row { from: &[Ready], on: E::Prepare, then: Stay(&[A::SayReady]), because: "it is prepared already" },
        Row { from: BUSY, on: E::Prepare, then: Refuse, because: FIRST },
        Row { from: &[Driving, Left], on: E::Prepare, then: Refuse, because: OVER },
        Row { from: &[Failed], on: E::Prepare, then: Stay(&[A::SayUnfit]), because: "it would fail again; a fresh worker may not" },
        Row { from: &[Preparing], on: E::Prepared, then: Go(Ready, &[A::SayReady]), because: "the arbiter begins nothing before it has heard this" },
        Row { from: &[Idle, Ready, Waiting, Taking, Reading, Returning, Driving, Failed, Left], on: E::Prepared, then: Refuse, because: "it was not preparing" },
        Row { from: &[Preparing], on: E::Unfit, then: Go(Failed, &[A::SayUnfit]), because: "it costs nothing to find out while the giver drives" },
        Row { from: &[Idle, Ready, Waiting, Taking, Reading, Returning, Driving, Failed, Left], on: E::Unfit, then: Refuse, because: "it was not preparing" },
        Row { from: &[Ready], on: E::Take, then: Go(Waiting, &[A::Look]), because: "the word says when" },
        Row { from: &[Waiting], on: E::Take, then: Stay(&[A::Look]), because: "the arbiter seized the lease and grants it anew: the older order is void (Y2)" },
        Row { from: &[Idle, Preparing, Failed], on: E::Take, then: Stay(&[A::SayLost]), because: "it cannot, and the arbiter must not wait for it" },
        Row { from: BUSY, on: E::Take, then: Refuse, because: FIRST },
        Row { from: &[Driving, Left], on: E::Take, then: Refuse, because: OVER },
        Row { from: &[Waiting], on: E::Free, then: Go(Taking, &[A::Take]), because: "the winner of the swap drives (Y1)" },
        Row { from: &[Idle, Preparing, Ready, Failed, Taking, Reading, Returning, Driving, Left], on: E::Free, then: Refuse, because: "nobody told it to take" },
        Row { from: &[Waiting], on: E::Moved, then: Go(Ready, &[A::SayLost]), because: "the order is void: the lease is in another epoch (Y2)" },
        Row { from: &[Idle, Preparing, Ready, Failed, Taking, Reading, Returning, Driving, Left], on: E::Moved, then: Refuse, because: "it was not looking" },
        Row { from: &[Taking], on: E::Won, then: Go(Reading, &[A::Read]), because: "the driver state stays as it is while we hold the lease (Y4)" },
        Row { from: &[Returning], on: E::Won, then: Go(Failed, &[A::SayFailed]), because: "the giver, or another stand-by, can have it" },
        Row { from: &[Taking], on: E::Lost, then: Go(Ready, &[A::SayLost]), because: "somebody else was quicker" },
        Row { from: &[Returning], on: E::Lost, then: Go(Failed, &[A::SayFailed]), because: "it was fenced and replaced meanwhile" },
        Row { from: &[Idle, Preparing, Ready, Waiting, Reading, Driving, Failed, Left], on: E::Won, then: Refuse, because: "it has tried no swap" },
        Row { from: &[Idle, Preparing, Ready, Waiting, Reading, Driving, Failed, Left], on: E::Lost, then: Refuse, because: "it has tried no swap" },
        Row { from: &[Reading], on: E::Sound, then: Go(Driving, &[A::LookOnce, A::SayTaken]), because: "frames that came in the gap may have rung no bell: it always looks once" },
        Row { from: &[Idle, Preparing, Ready, Waiting, Taking, Returning, Driving, Failed, Left], on: E::Sound, then: Refuse, because: "it was not reading" },
        Row { from: &[Reading], on: E::Broken, then: Go(Returning, &[A::Pass]), because: "nothing was touched yet: the giver can still go on" },
        Row { from: &[Idle, Preparing, Ready, Waiting, Taking, Returning, Driving, Failed, Left], on: E::Broken, then: Refuse, because: "it was not reading" },
        Row { from: &[Waiting], on: E::StandDown, then: Go(Ready, &[A::SayLost]), because: "the lease stays where it is, and the next to be told may be another" },
        Row { from: &[Idle, Preparing, Ready, Failed], on: E::StandDown, then: Stay(&[A::SayLost]), because: "it waits for nothing; the arbiter wants to hear that" },
        Row { from: BUSY, on: E::StandDown, then: Refuse, because: FIRST },
        Row { from: &[Driving, Left], on: E::StandDown, then: Refuse, because: OVER },
        Row { from: &[Idle, Preparing, Ready, Waiting, Failed], on: E::Leave, then: Go(Left, &[A::Go]), because: "another drives, and is believed to go on doing so" },
        Row { from: BUSY, on: E::Leave, then: Refuse, because: "it holds the lease, or may: leaving would strand it" },
        Row { from: &[Driving, Left], on: E::Leave, then: Refuse, because: OVER },
    ]
};
