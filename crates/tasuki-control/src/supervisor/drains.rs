//! Drains queues that are to go, so that no frame in them is lost: steps (2) to (4) of [`super::queues`]. A node that serves
//! queues of a virtual machine takes no more frames from the guest meanwhile: they wait until another worker serves them.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use tasuki_relay::wire::Order;
use tasuki_shm::crash;

use super::queues::TROUBLED_TIMEOUT;
use super::{Supervisor, WORKER_TIMEOUT, now};

/// An empty queue counts as drained after this long without traffic.
const QUIET_TIME: Duration = Duration::from_millis(20);

/// The same if the counters say that it is not empty: a killed worker can leave them so.
const UNEVEN_QUIET_TIME: Duration = Duration::from_millis(200);

/// Time a worker gets to drain a queue, and once more to drain its VNI rings.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A queue that is to go, once its worker has passed on what is in it.
#[derive(Debug)]
pub struct Draining {
    begun: Duration,
    /// Whether the directory hides the node. Until then its worker drains the queue, and after that its VNI rings.
    is_hidden: bool,
    /// The worker that drives it, and since when that worker drains this part.
    driver: (Option<u32>, Duration),
    /// Number of frames that have passed in this part, and since when it is that.
    moved: (u64, Duration),
    /// Whether the worker was asked for an answer since nothing moves.
    was_asked: bool,
}

impl Draining {
    /// Begins to drain the other part, or with another worker.
    fn begin(&mut self, driver: Option<u32>, moved: u64) {
        (self.driver, self.moved, self.was_asked) = ((driver, now()), (moved, now()), false);
    }
}

impl Supervisor {
    /// Begins to drain the queue that a node drives. Returns `None` if there is nothing to drain, or no way to: it has no
    /// queue, or the queue is detached, or the first queue is and its flows go by one of the others, which may be this one,
    /// or the kernel refuses. The frames that are in it are lost then.
    pub(super) fn begin_draining(&mut self, node: &str) -> Option<Draining> {
        self.bypass_queue(node).or_else(|| self.hold_borrower(node))?;
        let (begun, driver, moved) = (now(), (None, now()), (0, now()));
        Some(Draining { begun, is_hidden: false, driver, moved, was_asked: false })
    }

    /// Goes on to drain a node's queue. Returns whether nothing is left to do. A worker that is dead or hangs is waited
    /// for until another drives, and not for ever.
    pub(super) fn go_on_draining(&mut self, node: &str, it: &mut Draining) -> bool {
        let queue = self.queue(node).map(|(_, queue)| &queue.device);
        let Some(end) = self.end_on_vni(node).filter(|_| queue.is_some() || self.borrowing.contains(node)) else {
            return true;
        };
        let (driver, end) = (end.holder().filter(|_| end.is_settled() && self.is_held(end.number)), end.number);
        let Some([out, into]) = self.traffic_of(end) else { return true };
        // As long as the other nodes give it frames, its rings do not stand still.
        let traffic = if it.is_hidden { into } else { out };
        if it.driver.0 != driver {
            it.begin(driver, traffic.received);
        } else if it.moved.0 != traffic.received {
            it.moved = (traffic.received, now());
        }
        let mut poll: Vec<_> = queue.iter().map(|queue| PollFd::new(queue, PollFlags::IN)).collect();
        let waits =
            traffic.waits || rustix::event::poll(&mut poll, Some(&Timespec::default())).is_ok_and(|some| some > 0);
        let [stays, drains, lasts] = [it.moved.1, it.driver.1, it.begun].map(|since| now().saturating_sub(since));
        let is_over = match driver {
            Some(driver) => {
                let quiet_time = if waits { UNEVEN_QUIET_TIME } else { QUIET_TIME };
                let is_quiet = stays >= quiet_time || drains >= DRAIN_TIMEOUT;
                let was_asked = std::mem::replace(&mut it.was_asked, is_quiet);
                is_quiet && self.has_answered(driver, end, !was_asked)
            }
            None => drains >= if self.trouble_of(node).is_some() { TROUBLED_TIMEOUT } else { WORKER_TIMEOUT },
        };
        if !is_over && lasts < WORKER_TIMEOUT + self.config.daemon.hang_after() {
            return false;
        }
        if !it.is_hidden {
            // Frames from a node whose address the directory does not have are taken for forged: it had to send all first.
            self.show_address(end, false);
            crash::point("daemon.hidden");
            it.is_hidden = true;
            it.begin(driver, into.received);
            return false;
        }
        true
    }

    /// Returns whether a worker has answered the last probe; one that hangs has not. `asks` sends a probe first.
    fn has_answered(&mut self, number: u32, nic: u32, asks: bool) -> bool {
        let Some(worker) = self.workers.get_mut(&number) else { return false };
        if asks && worker.probe.is_none() {
            worker.probe = Some(now());
            let _ = worker.order(nic, Order::Who);
        }
        worker.probe.is_none()
    }
}
