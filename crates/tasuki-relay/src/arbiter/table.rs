//! The arbiter's table.

use crate::table::{Row, Then::*, listed};

listed! {
    /// State of the arbiter of one device. The *giver* is the worker that held the lease last; the *next* is the worker
    /// that is to have it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum State {
        /// The arbiter has started, and asks all workers for their identities.
        Finding,
        /// A worker holds the lease, and no order is under way.
        Steady,
        /// The next maps and checks.
        Preparing,
        /// The giver was ordered to release the lease, and no worker to take it: the giver is fenced first.
        Letting,
        /// The giver was ordered to release the lease, and the next to take it.
        Passing,
        /// The giver was ordered to keep the lease after all.
        Recalling,
        /// The next was ordered to stop waiting.
        Clearing,
        /// A worker that had the lease is being kept from the device.
        Fencing,
        /// The arbiter tries to win the lease itself.
        Seizing,
        /// The arbiter holds the lease, and looks for a worker to give it to.
        Choosing,
        /// The arbiter has passed the lease, and the next was ordered to take it.
        Granting,
        /// The arbiter holds the lease for lack of a worker, and has said so.
        Parked,
    }
}

listed! {
    /// Event at the arbiter, as far as the lease is concerned.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Event {
        /// Every worker has answered, or is dead or silent.
        Heard,
        /// A person or a policy asks for an upgrade or a handover.
        Asked,
        /// A person or a policy asks for the upgrade for which a worker was staged.
        AskedStaged,
        /// The next could go on at once.
        Ready,
        /// The next could go on, and the giver must be fenced before it does.
        ReadyBehindFence,
        /// The next cannot take this device.
        Unfit,
        /// The giver has passed the lease.
        Released,
        /// The giver keeps the lease.
        Kept,
        /// The giver keeps the lease, and the next waits for nothing.
        KeptAlone,
        /// The next drives.
        Taken,
        /// The next waits for the lease no more.
        Lost,
        /// The next held the lease and passed it back.
        Failed,
        /// The giver is dead.
        GiverGone,
        /// The giver's heartbeat is missing, or the giver committed a breach.
        GiverSilent,
        /// The next is dead or silent.
        NextGone,
        /// A worker other than the next could go on at once.
        SpareReady,
        /// The deadline is over.
        Deadline,
        /// No store of a worker that we fenced reaches the device any more.
        Fenced,
        /// The arbiter holds the lease.
        Seized,
        /// The arbiter does not hold the lease; it is free, or its holder is dead or fenced.
        FreeNow,
        /// The giver holds the lease, and lives.
        HeldByGiver,
        /// The next holds the lease, and lives.
        HeldByNext,
        /// The holder of the lease is silent or unknown.
        HeldBySilent,
        /// A worker is left that can take the lease: it is the next from now on.
        Chosen,
        /// As `Chosen`, but workers of nodes that the next does not trust are alive and must be fenced before.
        ChosenBehindFence,
        /// The lease word holds a value that no honest worker writes.
        Forged,
        /// No worker is left that can take the lease.
        NobodyLeft,
        /// The arbiter has passed the lease.
        PassedOn,
    }
}

/// Action of the arbiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Load the lease word.
    Look,
    /// Order the next to prepare.
    Prepare,
    /// Order the giver to release the lease.
    Release,
    /// Order the giver to keep the lease.
    Recall,
    /// Order the next to take the lease.
    Take,
    /// Order the next to stop waiting.
    StandDown,
    /// Set a deadline.
    Watch,
    /// Record the workers to be fenced as fenced, and keep them from the device: they run no instruction any more.
    Fence,
    /// Compare-and-swap: from the last known lease word to the arbiter.
    Seize,
    /// Look among the living workers for one that can go on.
    Choose,
    /// Compare-and-swap: from the arbiter to a free lease.
    PassOn,
    /// Note the next as the holder, and order workers that have no part any more to leave.
    Settle,
    /// Tell the requester the outcome, and the reason.
    Say,
}

/// The table.
#[rustfmt::skip]
pub const TABLE: &[Row<State, Event, Action>] = {
    use Action as A;
    use Event as E;
    use State::*;
    const NOTED: &str = "each worker's standing is noted for the next choice; the lease stays where it was";
    const FIRST: &str = "a row is carried out before the next event is heard (Y5)";
    const OUTCOME: &str = "it has tried nothing that ends so";
    const NOT_FINDING: &[State] = &[Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Seizing, Choosing, Granting, Parked];
    const BUSY: &[State] = &[Finding, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Granting];
    const INSIDE: &[State] = &[Seizing, Choosing];
    &[
        Row { from: &[Finding], on: E::Heard, then: Stay(&[A::Look]), because: "nobody waits for the lease now, so only its holder can change the word" },
        Row { from: NOT_FINDING, on: E::Heard, then: Refuse, because: "it knows them" },

        Row { from: &[Steady], on: E::Asked, then: Go(Preparing, &[A::Prepare, A::Watch]), because: "slow steps are done while the giver drives" },
        Row { from: BUSY, on: E::Asked, then: Refuse, because: "one relay at a time; ask again when this one has settled" },
        Row { from: INSIDE, on: E::Asked, then: Refuse, because: FIRST },
        Row { from: &[Parked], on: E::Asked, then: Go(Choosing, &[A::Choose]), because: "nobody drives, and all that the next does not trust are fenced: it is ready, and need not wait for anybody" },

        Row { from: &[Steady], on: E::AskedStaged, then: Go(Passing, &[A::Take, A::Release, A::Watch]), because: "it has said before that it could go on at once" },
        Row { from: BUSY, on: E::AskedStaged, then: Refuse, because: "one relay at a time; ask again when this one has settled" },
        Row { from: INSIDE, on: E::AskedStaged, then: Refuse, because: FIRST },
        Row { from: &[Parked], on: E::AskedStaged, then: Refuse, because: "nobody drives, and a staged worker is asked for like any other" },

        Row { from: &[Preparing], on: E::Ready, then: Go(Passing, &[A::Take, A::Release, A::Watch]), because: "the taker watches the word when the giver passes it: no message stands between release and take" },
        Row { from: &[Granting, Finding, Steady, Letting, Passing, Recalling, Clearing, Fencing], on: E::Ready, then: Stay(&[]), because: NOTED },
        Row { from: INSIDE, on: E::Ready, then: Refuse, because: FIRST },
        Row { from: &[Parked], on: E::Ready, then: Go(Choosing, &[A::Choose]), because: "somebody can go on after all" },
        Row { from: &[Preparing], on: E::ReadyBehindFence, then: Go(Letting, &[A::Release, A::Watch]), because: "a giver that is not trusted must be kept from the device before anybody else has it" },
        Row { from: &[Granting, Finding, Steady, Letting, Passing, Recalling, Clearing, Fencing], on: E::ReadyBehindFence, then: Stay(&[]), because: NOTED },
        Row { from: INSIDE, on: E::ReadyBehindFence, then: Refuse, because: FIRST },
        Row { from: &[Parked], on: E::ReadyBehindFence, then: Go(Choosing, &[A::Choose]), because: "somebody can go on after all" },
        Row { from: &[Preparing], on: E::Unfit, then: Go(Steady, &[A::Say]), because: "the giver drives on; it was told nothing" },
        Row { from: &[Granting, Finding, Steady, Letting, Passing, Recalling, Clearing, Fencing, Parked], on: E::Unfit, then: Stay(&[]), because: NOTED },
        Row { from: INSIDE, on: E::Unfit, then: Refuse, because: FIRST },

        Row { from: &[Passing], on: E::Released, then: Stay(&[]), because: "the word says so already, and the next watches it" },
        Row { from: &[Letting], on: E::Released, then: Go(Fencing, &[A::Fence]), because: "it says that it has stopped, and is not believed" },
        Row { from: &[Recalling], on: E::Released, then: Go(Seizing, &[A::Seize]), because: "it had let go before it was told to stay" },
        Row { from: &[Steady, Preparing, Clearing], on: E::Released, then: Go(Seizing, &[A::Seize]), because: "an order of an arbiter that died was carried out: nobody drives" },
        Row { from: &[Finding, Fencing, Granting, Parked], on: E::Released, then: Stay(&[]), because: "the word says more than the message" },
        Row { from: INSIDE, on: E::Released, then: Refuse, because: FIRST },
        Row { from: &[Letting, Passing, Recalling], on: E::Kept, then: Go(Clearing, &[A::StandDown, A::Say]), because: "the next may still wait for this very word, and would win the next release" },
        Row { from: &[Finding, Steady, Preparing, Clearing, Fencing, Granting, Parked], on: E::Kept, then: Stay(&[]), because: "an answer to an order that is settled" },
        Row { from: INSIDE, on: E::Kept, then: Refuse, because: FIRST },
        Row { from: &[Letting, Passing, Recalling], on: E::KeptAlone, then: Go(Steady, &[A::Say]), because: "the giver drives on, and nobody else waits" },
        Row { from: &[Finding, Steady, Preparing, Clearing, Fencing, Granting, Parked], on: E::KeptAlone, then: Stay(&[]), because: "an answer to an order that is settled" },
        Row { from: INSIDE, on: E::KeptAlone, then: Refuse, because: FIRST },

        Row { from: &[Passing, Recalling, Clearing, Granting], on: E::Taken, then: Go(Steady, &[A::Settle, A::Say]), because: "the relay is over: the word has said so since it was won" },
        Row { from: &[Finding, Fencing], on: E::Taken, then: Stay(&[]), because: "the arbiter reads or swaps the word before it decides" },
        Row { from: &[Steady, Preparing, Letting, Parked], on: E::Taken, then: Refuse, because: "nobody was told to take: a worker that lies, or that was believed to be silent" },
        Row { from: INSIDE, on: E::Taken, then: Refuse, because: FIRST },
        Row { from: &[Clearing], on: E::Lost, then: Go(Steady, &[]), because: "nobody waits any more: the next relay can begin" },
        Row { from: &[Passing, Granting], on: E::Lost, then: Go(Seizing, &[A::Seize]), because: "it cannot, or the word is another than we believed: the outcome says which" },
        Row { from: &[Finding, Steady, Preparing, Letting, Recalling, Fencing], on: E::Lost, then: Stay(&[]), because: NOTED },
        Row { from: &[Parked], on: E::Lost, then: Go(Choosing, &[A::Choose]), because: "it was late, and could go on now" },
        Row { from: INSIDE, on: E::Lost, then: Refuse, because: FIRST },
        Row { from: &[Passing, Recalling, Granting], on: E::Failed, then: Go(Seizing, &[A::Seize]), because: "nobody drives: roll back to the giver, or on to another" },
        Row { from: &[Finding, Fencing], on: E::Failed, then: Stay(&[]), because: "the arbiter reads or swaps the word before it decides" },
        Row { from: &[Steady, Preparing, Letting, Clearing, Parked], on: E::Failed, then: Refuse, because: "nobody was told to take: a worker that lies, or that was believed to be silent" },
        Row { from: INSIDE, on: E::Failed, then: Refuse, because: FIRST },

        Row { from: &[Steady, Preparing, Letting, Passing, Recalling, Clearing], on: E::GiverGone, then: Go(Seizing, &[A::Seize]), because: "the dead write nothing: takeover" },
        Row { from: &[Finding, Fencing, Granting, Parked], on: E::GiverGone, then: Stay(&[]), because: NOTED },
        Row { from: INSIDE, on: E::GiverGone, then: Refuse, because: FIRST },
        Row { from: &[Steady, Preparing, Letting, Passing, Recalling, Clearing], on: E::GiverSilent, then: Go(Fencing, &[A::Fence]), because: "it may wake at any time, and must not reach the device then" },
        Row { from: &[Finding, Fencing, Granting, Parked], on: E::GiverSilent, then: Stay(&[]), because: NOTED },
        Row { from: INSIDE, on: E::GiverSilent, then: Refuse, because: FIRST },
        Row { from: &[Preparing], on: E::NextGone, then: Go(Steady, &[A::Say]), because: "the giver drives on; it was told nothing" },
        Row { from: &[Letting], on: E::NextGone, then: Go(Recalling, &[A::Recall, A::Watch]), because: "there is nobody to let go for" },
        Row { from: &[Clearing], on: E::NextGone, then: Go(Steady, &[]), because: "the dead wait for nothing, and a silent one that takes after all is found and fenced" },
        Row { from: &[Passing, Granting], on: E::NextGone, then: Go(Seizing, &[A::Seize]), because: "it took the lease or did not: only the word knows" },
        Row { from: &[Finding, Steady, Recalling, Fencing, Parked], on: E::NextGone, then: Stay(&[]), because: NOTED },
        Row { from: INSIDE, on: E::NextGone, then: Refuse, because: FIRST },
        Row { from: &[Finding, Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Granting], on: E::SpareReady, then: Stay(&[]), because: NOTED },
        Row { from: &[Parked], on: E::SpareReady, then: Go(Choosing, &[A::Choose]), because: "somebody can go on after all" },
        Row { from: INSIDE, on: E::SpareReady, then: Refuse, because: FIRST },

        Row { from: &[Preparing], on: E::Deadline, then: Go(Steady, &[A::Say]), because: "the giver drives on; it was told nothing" },
        Row { from: &[Letting], on: E::Deadline, then: Go(Recalling, &[A::Recall, A::Watch]), because: "nobody else was told anything: the giver is asked which it is" },
        Row { from: &[Passing, Granting], on: E::Deadline, then: Go(Seizing, &[A::Seize]), because: "a deadline decides nothing: it has the arbiter try the word (Y1)" },
        Row { from: &[Recalling], on: E::Deadline, then: Go(Fencing, &[A::Fence]), because: "a giver that neither lets go nor stays is hung" },
        Row { from: &[Finding, Steady, Clearing, Fencing, Parked], on: E::Deadline, then: Stay(&[]), because: "no deadline is set here" },
        Row { from: INSIDE, on: E::Deadline, then: Refuse, because: FIRST },

        Row { from: &[Fencing], on: E::Fenced, then: Go(Seizing, &[A::Seize]), because: "from now on it does no harm, and may lose the lease (Y3)" },
        Row { from: &[Finding, Steady, Preparing, Letting, Passing, Recalling, Clearing, Granting, Parked], on: E::Fenced, then: Stay(&[]), because: "the fenced worker is not in the way" },
        Row { from: INSIDE, on: E::Fenced, then: Refuse, because: FIRST },

        Row { from: &[Finding, Seizing], on: E::Seized, then: Go(Choosing, &[A::Choose]), because: "nobody drives, and nobody can begin but by our leave" },
        Row { from: &[Finding, Seizing], on: E::FreeNow, then: Go(Seizing, &[A::Seize]), because: "its holder does no harm: try again from the present word" },
        Row { from: &[Finding], on: E::HeldByGiver, then: Go(Steady, &[]), because: "packets flowed while the arbiter was away" },
        Row { from: &[Seizing], on: E::HeldByGiver, then: Go(Recalling, &[A::Recall, A::Watch]), because: "it has not let go by the deadline: roll back before anything has changed" },
        Row { from: &[Seizing], on: E::HeldByNext, then: Go(Steady, &[A::Settle, A::Say]), because: "it was quicker than the deadline" },
        Row { from: &[Finding, Seizing], on: E::HeldBySilent, then: Go(Fencing, &[A::Fence]), because: "every worker that may still write is fenced before the lease passes (Y3)" },
        Row { from: &[Finding], on: E::HeldByNext, then: Refuse, because: "nobody was told to take" },
        Row { from: &[Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Choosing, Granting, Parked], on: E::Seized, then: Refuse, because: OUTCOME },
        Row { from: &[Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Choosing, Granting, Parked], on: E::FreeNow, then: Refuse, because: OUTCOME },
        Row { from: &[Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Choosing, Granting, Parked], on: E::HeldByGiver, then: Refuse, because: OUTCOME },
        Row { from: &[Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Choosing, Granting, Parked], on: E::HeldByNext, then: Refuse, because: OUTCOME },
        Row { from: &[Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Choosing, Granting, Parked], on: E::HeldBySilent, then: Refuse, because: OUTCOME },

        Row { from: &[Choosing], on: E::Chosen, then: Go(Granting, &[A::PassOn]), because: "the next that was asked for, else the giver, else a stand-by" },
        Row { from: &[Choosing], on: E::ChosenBehindFence, then: Go(Fencing, &[A::Fence]), because: "no process that had the device may run when it goes to a node that does not trust it" },
        Row { from: &[Finding, Steady, Seizing, Granting], on: E::Forged, then: Go(Fencing, &[A::Fence]), because: "the word names a worker that cannot hold it, or will not stand still: all that can have written it are fenced, and nobody else" },
        Row { from: &[Choosing], on: E::NobodyLeft, then: Go(Parked, &[A::Say]), because: "the card goes on filling its ring; nobody reads it until somebody is ready" },
        Row { from: &[Finding, Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Seizing, Granting, Parked], on: E::Chosen, then: Refuse, because: OUTCOME },
        Row { from: &[Finding, Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Seizing, Granting, Parked], on: E::ChosenBehindFence, then: Refuse, because: OUTCOME },
        Row { from: &[Preparing, Letting, Passing, Recalling, Clearing, Fencing, Choosing, Parked], on: E::Forged, then: Refuse, because: OUTCOME },
        Row { from: &[Finding, Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Seizing, Granting, Parked], on: E::NobodyLeft, then: Refuse, because: OUTCOME },
        Row { from: &[Granting], on: E::PassedOn, then: Stay(&[A::Take, A::Watch]), because: "only the worker that is ordered now can take from this word (Y2)" },
        Row { from: &[Finding, Steady, Preparing, Letting, Passing, Recalling, Clearing, Fencing, Seizing, Choosing, Parked], on: E::PassedOn, then: Refuse, because: OUTCOME },
    ]
};
