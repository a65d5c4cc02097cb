use std::num::NonZeroU32;

use super::*;
use crate::wire::Standing;

const HOME: Node = Node(1);
const ABROAD: Node = Node(2);

fn party(number: u32) -> Party {
    Party(NonZeroU32::new(number).unwrap())
}

fn held_by(number: u32, epoch: u32) -> Tenure {
    Tenure { holder: Some(party(number)), epoch }
}

/// Worker 1 drives.
fn steady() -> (Arbiter, Table) {
    let table = Table::default();
    let (mut arbiter, _) = Arbiter::begin(HOME, &[HOME], &[(party(1), HOME)], &[]);
    let hello = Report::Hello { standing: Standing::Holding, epoch: 1 };
    assert_eq!(arbiter.hear(&table, Input::Report(party(1), hello, held_by(1, 1))), Ok(vec![Do::Look]));
    arbiter.hear(&table, Input::Word(held_by(1, 1))).unwrap();
    assert_eq!(arbiter.driver(), Some(party(1)));
    (arbiter, table)
}

fn says(arbiter: &mut Arbiter, table: &Table, number: u32, report: Report) -> Vec<Do> {
    arbiter.hear(table, Input::Report(party(number), report, held_by(1, 1))).unwrap()
}

fn ask(number: u32) -> Input {
    let (purpose, method) = (Use::Handover, Method::Repoint);
    Input::Asked(Ask { purpose, to: party(number), method, kind: 0, version: 0 })
}

#[test]
fn a_node_that_is_not_trusted_any_more_gets_a_fresh_page_and_cannot_hold_the_old_one() {
    const OTHER: Node = Node(7);
    let (mut arbiter, _) = steady();
    arbiter.befriend(HOME, &[OTHER]);
    assert_eq!(arbiter.give(party(2), OTHER), Some(Page::Shared));
    let (mut arbiter, _) = Arbiter::begin(HOME, &[HOME, OTHER], &[(party(1), HOME), (party(2), OTHER)], &[]);
    assert!(arbiter.share_page(HOME, OTHER) && arbiter.may_hold(party(2)));
    arbiter.estrange(HOME, OTHER);
    assert!(!arbiter.share_page(HOME, OTHER) && !arbiter.may_hold(party(2)) && arbiter.may_hold(party(1)));
    assert_eq!((arbiter.page_for(OTHER), arbiter.page_for(HOME)), (Page::Fresh, Page::Shared));
}

#[test]
fn a_dismissed_worker_is_told_so_and_not_chosen_any_more() {
    let (mut arbiter, table) = steady();
    assert_eq!(arbiter.give(party(2), HOME), Some(Page::Shared));
    assert_eq!(arbiter.give(party(3), HOME), Some(Page::Shared));
    says(&mut arbiter, &table, 2, Report::Ready);
    assert_eq!(arbiter.dismiss(party(2)), [Do::Tell(party(2), Order::Leave)]);
    assert_eq!(arbiter.dismiss(party(1)), [], "a driver cannot be spared");
    assert_eq!(
        arbiter.dismiss(party(3)),
        [Do::Tell(party(3), Order::Leave)],
        "a worker that prepares has not reported yet"
    );
    assert_eq!(says(&mut arbiter, &table, 2, Report::Ready), [], "it was said before it heard");
    let doing = arbiter.hear(&table, Input::Gone(party(1))).unwrap();
    assert!(matches!(doing[..], [Do::Swap { .. }]), "{doing:?}");
    let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    assert_eq!(doing, [Do::Say(RelayOutcome { driver: None, why: Some(Reason::NobodyLeft) })]);
}

/// A staged worker does not stand by for another worker's death, and begins at once when it is asked for.
#[test]
fn a_staged_worker_takes_when_it_is_asked_for_and_not_before() {
    let upgrade = |number| {
        let (purpose, method) = (Use::Upgrade, Method::Keep);
        Input::Asked(Ask { purpose, to: party(number), method, kind: 0, version: 0 })
    };
    let (mut arbiter, table) = steady();
    for number in [2, 3] {
        arbiter.give(party(number), HOME).unwrap();
        says(&mut arbiter, &table, number, Report::Ready);
    }
    arbiter.stage(party(2));
    let mut asked = arbiter.clone();
    let doing = asked.hear(&table, upgrade(2)).unwrap();
    let (take, release) = (Order::Take { epoch: 1, after: After::Passed, wrote: 1 }, Order::Release { epoch: 1 });
    assert_eq!(doing, [Do::Tell(party(2), take), Do::Tell(party(1), release), Do::Watch(1)]);
    let doing = asked.hear(&table, Input::Report(party(2), Report::Taken { epoch: 2 }, held_by(2, 2))).unwrap();
    assert_eq!(doing[0], Do::Tell(party(1), Order::Leave));
    assert_eq!((asked.driver(), asked.state()), (Some(party(2)), State::Steady));
    // The arbiter chooses the stand-by, and without one no worker.
    for (dead, next) in [(1, Some(3)), (3, None)] {
        arbiter.hear(&table, Input::Gone(party(dead))).unwrap();
        let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap_or_default();
        if next.is_some() {
            assert!(matches!(doing[..], [Do::Swap { .. }]), "{doing:?}");
            let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
            assert!(matches!(doing[0], Do::Tell(who, Order::Take { .. }) if who == party(3)), "{doing:?}");
        }
    }
    assert_eq!(
        (arbiter.state(), arbiter.driver()),
        (State::Parked, None),
        "a program that nobody asked for does not drive"
    );
    // Other stand-bys are ordered to prepare once more.
    let (mut arbiter, table) = steady();
    arbiter.give(party(2), HOME).unwrap();
    says(&mut arbiter, &table, 2, Report::Ready);
    let doing = arbiter.hear(&table, upgrade(2)).unwrap();
    assert!(matches!(doing[0], Do::Tell(who, Order::Prepare { .. }) if who == party(2)), "{doing:?}");
}

#[test]
fn however_many_have_died_there_is_room_for_a_fresh_one() {
    let (mut arbiter, table) = steady();
    for number in 2..50 {
        assert!(arbiter.give(party(number), HOME).is_some());
        says(&mut arbiter, &table, number, Report::Ready);
        assert_eq!(arbiter.is(party(number)), Some(Is::Ready));
        arbiter.hear(&table, Input::Gone(party(number))).unwrap();
    }
    assert!(arbiter.members().len() <= MEMBERS_MAX && arbiter.driver() == Some(party(1)));
    let living = (60..).take_while(|number| arbiter.give(party(*number), HOME).is_some()).count();
    assert_eq!(living, MEMBERS_MAX - 1, "the living make no room");
}

/// They live on for another device.
#[test]
fn those_that_have_left_take_no_room_and_are_fenced_all_the_same() {
    let (mut arbiter, table) = steady();
    for number in 10..30 {
        assert_eq!(arbiter.give(party(number), HOME), Some(Page::Shared));
        says(&mut arbiter, &table, number, Report::Ready);
        assert_eq!(arbiter.dismiss(party(number)), [Do::Tell(party(number), Order::Leave)]);
    }
    // One had it when another arbiter was there.
    arbiter.remember([(party(30), HOME), (party(1), HOME)]);
    assert_eq!(arbiter.give(party(3), ABROAD), Some(Page::Fresh));
    arbiter.hear(&table, ask(3)).unwrap();
    says(&mut arbiter, &table, 3, Report::Ready);
    let doing = arbiter.hear(&table, Input::Report(party(1), Report::Released { epoch: 1 }, Tenure::free(1))).unwrap();
    let all: Vec<_> = [1].into_iter().chain(10..=30).map(|number| Do::Fence(party(number))).collect();
    assert_eq!(doing, all);
    for number in [1].into_iter().chain(10..=30) {
        arbiter.hear(&table, Input::Fenced(party(number))).unwrap();
    }
    arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    (40..60).for_each(|number| _ = arbiter.give(party(number), ABROAD));
    assert_eq!(arbiter.members().len(), MEMBERS_MAX, "the dead are forgotten");
}

/// A worker of a friend had the device before this arbiter began.
#[test]
fn one_that_has_left_is_not_fenced_for_a_node_that_trusts_it() {
    for is_friend in [true, false] {
        let (mut arbiter, table) = steady();
        if is_friend {
            arbiter.befriend(ABROAD, &[HOME]);
        }
        arbiter.remember([(party(30), ABROAD)]);
        arbiter.give(party(2), HOME);
        says(&mut arbiter, &table, 2, Report::Ready);
        arbiter.hear(&table, Input::Gone(party(1))).unwrap();
        let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
        assert_eq!(doing.contains(&Do::Fence(party(30))), !is_friend, "{doing:?}");
        assert_eq!(arbiter.next(), Some(party(2)));
    }
}

#[test]
fn a_report_of_a_worker_that_was_given_nothing_is_a_breach() {
    let (mut arbiter, table) = steady();
    let reports = [Report::Ready, Report::Lost { epoch: 1, ready: true }, Report::Taken { epoch: 2 }];
    for report in reports {
        assert!(matches!(says(&mut arbiter, &table, 7, report)[..], [Do::Breach(who, _)] if who == party(7)));
    }
    assert_eq!(arbiter.driver(), Some(party(1)), "nobody else loses anything");
}

/// A stand-by writes the lease word before it ends.
#[test]
fn what_a_standby_has_left_in_the_word_is_found_when_it_is_dead() {
    let (mut arbiter, table) = steady();
    for number in [2, 3] {
        arbiter.give(party(number), HOME);
        says(&mut arbiter, &table, number, Report::Ready);
    }
    assert_eq!(arbiter.hear(&table, Input::Gone(party(2))), Ok(vec![Do::Look]));
    assert_eq!(arbiter.clone().hear(&table, Input::Word(held_by(1, 1))), Ok(vec![]), "it was honest");
    for word in [held_by(2, 1), held_by(3, 2), held_by(99, 1), Tenure::free(0), Tenure::free(2)] {
        let doing = arbiter.clone().hear(&table, Input::Word(word)).unwrap();
        assert_eq!(doing, [Do::Fence(party(1)), Do::Fence(party(3))], "all that live and could write {word:?}");
    }
    // If the driver has not let go of it, it drives on: no other worker drives before it is fenced.
    assert_eq!(arbiter.hear(&table, Input::Word(Tenure::free(1))), Ok(vec![Do::Fence(party(1))]));
    let seize = |from: Tenure| vec![Do::Swap { from, to: from.taken_by(ARBITER) }];
    assert_eq!(arbiter.hear(&table, Input::Fenced(party(1))), Ok(seize(held_by(1, 1))));
    assert_eq!(arbiter.hear(&table, Input::Swapped(Err(Tenure::free(1)))), Ok(seize(Tenure::free(1))));
    let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    assert!(matches!(doing[..], [Do::Swap { .. }]), "the other stand-by is chosen: {doing:?}");
}

/// A taker was slower than its deadline and has the lease by then. Its giver ends, and before that is heard it finds that it
/// cannot go on, and passes.
#[test]
fn a_lease_that_its_driver_has_passed_and_not_spoken_of_harms_nobody_else() {
    let (mut arbiter, table) = steady();
    for number in [2, 3] {
        arbiter.give(party(number), HOME);
        says(&mut arbiter, &table, number, Report::Ready);
    }
    let asked = Ask { purpose: Use::Upgrade, to: party(2), method: Method::Keep, kind: 0, version: 0 };
    arbiter.hear(&table, Input::Asked(asked)).unwrap();
    says(&mut arbiter, &table, 2, Report::Ready);
    let deadline = Input::Deadline(arbiter.deadline);
    assert!(matches!(arbiter.hear(&table, deadline).unwrap()[..], [Do::Swap { .. }]));
    let doing = arbiter.hear(&table, Input::Swapped(Err(held_by(2, 2)))).unwrap();
    assert!(doing.contains(&Do::Tell(party(1), Order::Leave)), "{doing:?}");
    assert_eq!(arbiter.driver(), Some(party(2)));
    assert_eq!(arbiter.hear(&table, Input::Gone(party(1))), Ok(vec![Do::Look]));
    assert_eq!(arbiter.hear(&table, Input::Word(Tenure::free(2))), Ok(vec![Do::Fence(party(2))]));
}

/// The taker is heard first; by then the giver is a worker like any other.
#[test]
fn a_giver_that_is_heard_late_was_honest() {
    let (mut arbiter, table) = steady();
    arbiter.give(party(2), HOME);
    says(&mut arbiter, &table, 2, Report::Ready);
    let asked = Ask { purpose: Use::Upgrade, to: party(2), method: Method::Keep, kind: 0, version: 0 };
    arbiter.hear(&table, Input::Asked(asked)).unwrap();
    says(&mut arbiter, &table, 2, Report::Ready);
    let taken = Input::Report(party(2), Report::Taken { epoch: 2 }, held_by(2, 2));
    let doing = arbiter.hear(&table, taken).unwrap();
    assert!(doing.contains(&Do::Tell(party(1), Order::Leave)), "{doing:?}");
    assert_eq!(arbiter.driver(), Some(party(2)));
    assert_eq!(arbiter.give(party(1), HOME), Some(Page::Shared));
    let released = |epoch| Input::Report(party(1), Report::Released { epoch }, held_by(2, 2));
    assert_eq!(arbiter.hear(&table, released(1)), Ok(vec![]), "it was said before it was given the device anew");
    let doing = arbiter.hear(&table, released(2)).unwrap();
    assert!(
        matches!(doing[..], [Do::Breach(who, _)] if who == party(1)),
        "of this tenure it has none to pass: {doing:?}"
    );
}

/// Finding 3: the giver names a victim in its lease word.
#[test]
fn a_lease_word_that_names_a_stranger_condemns_its_writers_and_not_the_stranger() {
    let (mut arbiter, table) = steady();
    arbiter.give(party(2), HOME);
    arbiter.give(party(3), ABROAD);
    assert_eq!(arbiter.hear(&table, Input::Gone(party(1))).unwrap().len(), 1);
    for victim in [party(3), party(99)] {
        let mut arbiter = arbiter.clone();
        let forged = Tenure { holder: Some(victim), epoch: 2 };
        let doing = arbiter.hear(&table, Input::Swapped(Err(forged))).unwrap();
        assert_eq!(doing, [Do::Fence(party(2))], "every living worker that could write it");
    }
}

#[test]
fn a_word_that_changes_without_end_condemns_its_writers() {
    let (mut arbiter, table) = steady();
    arbiter.hear(&table, Input::Gone(party(1))).unwrap();
    arbiter.give(party(2), HOME);
    for epoch in 2.. {
        let doing = arbiter.hear(&table, Input::Swapped(Err(Tenure::free(epoch)))).unwrap();
        if doing == [Do::Fence(party(2))] {
            break;
        }
        assert!(epoch < 50, "the arbiter's loop has no end");
    }
}

/// Finding 1: every process of the old node that had the card is fenced, and the new owner has a page of its own.
#[test]
fn a_stranger_gets_the_device_when_nobody_of_the_old_node_can_run() {
    let (mut arbiter, table) = steady();
    arbiter.give(party(2), HOME);
    says(&mut arbiter, &table, 2, Report::Ready);
    arbiter.give(party(4), HOME);
    arbiter.dismiss(party(4));
    assert_eq!(arbiter.give(party(3), ABROAD), Some(Page::Fresh));
    arbiter.hear(&table, ask(3)).unwrap();
    says(&mut arbiter, &table, 3, Report::Ready);
    let doing = arbiter.hear(&table, Input::Report(party(1), Report::Released { epoch: 1 }, Tenure::free(1))).unwrap();
    assert_eq!(doing, [Do::Fence(party(1)), Do::Fence(party(2)), Do::Fence(party(4))]);
    // An exit mark in memory that the old node can write is no fence.
    assert_eq!(arbiter.hear(&table, Input::Ended(party(2))).unwrap(), []);
    assert_eq!(arbiter.hear(&table, Input::Fenced(party(1))).unwrap(), []);
    assert_eq!(arbiter.hear(&table, Input::Gone(party(2))).unwrap(), []);
    let doing = arbiter.hear(&table, Input::Fenced(party(4))).unwrap();
    assert!(matches!(doing[..], [Do::Swap { .. }]), "{doing:?}");
    let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    assert!(matches!(doing[..], [Do::Renew { node: ABROAD, .. }, Do::Swap { .. }]), "{doing:?}");
    arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    let taken = Input::Report(party(3), Report::Taken { epoch: 3 }, held_by(3, 3));
    arbiter.hear(&table, taken).unwrap();
    assert_eq!(arbiter.driver(), Some(party(3)));
    assert!(!arbiter.may_hold(party(1)) && arbiter.page_for(HOME) == Page::Fresh);
}

/// Grants the lease to party 3, which its device's node does not trust, once party 1 has let go and is fenced.
fn grants_abroad(arbiter: &mut Arbiter, table: &Table) {
    arbiter.give(party(3), ABROAD);
    arbiter.hear(table, ask(3)).unwrap();
    says(arbiter, table, 3, Report::Ready);
    arbiter.hear(table, Input::Report(party(1), Report::Released { epoch: 1 }, Tenure::free(1))).unwrap();
    arbiter.hear(table, Input::Fenced(party(1))).unwrap();
    arbiter.hear(table, Input::Swapped(Ok(()))).unwrap();
    arbiter.hear(table, Input::Swapped(Ok(()))).unwrap();
}

/// The taker refuses the card that the last owner has left, and all workers of that owner are fenced. A device that no
/// worker drives then goes to the requested worker if that is ready, and to no other.
#[test]
fn a_device_that_nobody_drives_goes_to_whom_it_is_asked_for_and_who_is_ready() {
    let (mut arbiter, table) = steady();
    grants_abroad(&mut arbiter, &table);
    let reason = Reason::LeftBehind { value: 2 };
    let failed = Input::Report(party(3), Report::Failed { epoch: 3, reason }, Tenure::free(3));
    assert!(matches!(arbiter.hear(&table, failed).unwrap()[..], [Do::Swap { .. }]));
    let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    assert_eq!(doing, [Do::Say(RelayOutcome { driver: None, why: Some(reason) })], "the requester hears the reason");
    // A worker that is not ready would leave the device parked.
    assert!(matches!(arbiter.hear(&table, ask(3)).unwrap()[..], [Do::Say(RelayOutcome { driver: None, .. })]));
    assert_eq!(arbiter.state(), State::Parked);
    assert_eq!(arbiter.dismiss(party(3)), [Do::Tell(party(3), Order::Leave)]);
    assert_eq!(arbiter.give(party(4), ABROAD), Some(Page::Shared), "the page is that node's by now");
    says(&mut arbiter, &table, 4, Report::Ready);
    let doing = arbiter.hear(&table, ask(4)).unwrap();
    assert!(matches!(doing[..], [Do::Swap { .. }]), "nobody is left to be fenced: {doing:?}");
    let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    assert!(matches!(doing[..], [Do::Tell(to, Order::Take { .. }), Do::Watch(_)] if to == party(4)), "{doing:?}");
}

/// The taker may have reset the device, or pointed it elsewhere, and no worker of the old node finds that in its ledger.
#[test]
fn a_device_that_a_stranger_was_granted_and_did_not_settle_with_goes_to_nobody_who_would_go_on_with_it() {
    const FRIEND: Node = Node(7);
    for (home, ready_when_it_dies) in [(HOME, true), (HOME, false), (FRIEND, false)] {
        let (mut arbiter, table) = steady();
        arbiter.befriend(HOME, &[FRIEND]);
        grants_abroad(&mut arbiter, &table);
        let fresh = |arbiter: &mut Arbiter| {
            assert_eq!(arbiter.give(party(4), home), Some(Page::Fresh));
            says(arbiter, &table, 4, Report::Ready)
        };
        if ready_when_it_dies {
            assert_eq!(fresh(&mut arbiter), []);
        }
        let doing = arbiter.hear(&table, Input::Gone(party(3))).unwrap();
        assert!(matches!(doing[..], [Do::Swap { .. }]), "{doing:?}");
        let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
        assert!(matches!(doing[..], [Do::Say(RelayOutcome { driver: None, why: Some(_) })]), "{doing:?}");
        if !ready_when_it_dies {
            let doing = fresh(&mut arbiter);
            assert!(matches!(doing[..], [Do::Say(RelayOutcome { driver: None, .. })]), "{doing:?}");
        }
        let keep = Ask { purpose: Use::Handover, to: party(4), method: Method::Keep, kind: 0, version: 0 };
        let doing = arbiter.hear(&table, Input::Asked(keep)).unwrap();
        assert!(matches!(doing[..], [Do::Say(RelayOutcome { driver: None, .. })]), "{doing:?}");
        // Another stranger begins from the card as it finds it.
        arbiter.give(party(5), ABROAD).unwrap();
        says(&mut arbiter, &table, 5, Report::Ready);
        assert!(matches!(arbiter.hear(&table, ask(5)).unwrap()[..], [Do::Fence(fenced)] if fenced == party(4)));
    }
}

/// Finding 1 without malice: when the new owner's driver dies, no worker of the old owner is chosen.
#[test]
fn a_stand_by_of_another_node_is_not_chosen() {
    let (mut arbiter, table) = steady();
    arbiter.befriend(ABROAD, &[HOME]);
    assert_eq!(arbiter.give(party(2), ABROAD), Some(Page::Shared));
    says(&mut arbiter, &table, 2, Report::Ready);
    arbiter.hear(&table, Input::Gone(party(1))).unwrap();
    let doing = arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    assert_eq!(doing, [Do::Say(RelayOutcome { driver: None, why: Some(Reason::NobodyLeft) })]);
}

#[test]
fn every_report_of_every_worker_has_one_verdict() {
    assert_eq!(authority::gaps(AUTHORITY), []);
}

/// A new daemon asks workers which of them drives, with a deadline, and all have answered before that.
#[test]
fn a_deadline_that_expires_while_a_worker_drives_is_no_reason_of_the_next_relay() {
    let (mut arbiter, table) = steady();
    arbiter.give(party(2), HOME).unwrap();
    says(&mut arbiter, &table, 2, Report::Ready);
    let number = arbiter.deadline;
    assert_eq!(arbiter.hear(&table, Input::Deadline(number)), Ok(vec![]));
    arbiter.hear(&table, Input::Gone(party(1))).unwrap();
    for _ in 0..2 {
        arbiter.hear(&table, Input::Swapped(Ok(()))).unwrap();
    }
    let epoch = arbiter.seen.epoch + 1;
    let taken = Input::Report(party(2), Report::Taken { epoch }, held_by(2, epoch));
    let doing = arbiter.hear(&table, taken).unwrap();
    assert!(doing.contains(&Do::Say(RelayOutcome { driver: Some(party(2)), why: None })), "{doing:?}");
}
