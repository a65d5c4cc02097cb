//! Decides which nodes a sender still waits for, so that a node without room delays the frames behind its own once, and
//! only briefly.

use std::time::{Duration, Instant};

use tasuki_shm::vni::directory::NodeSet;

/// How long a frame, with all frames behind it, waits for a node that has no room for it.
pub const WAIT: Duration = Duration::from_millis(2);

/// Nodes that a frame waited for in vain and that have had no room since.
#[derive(Debug, Default)]
pub struct Slow(NodeSet);

impl Slow {
    /// Returns whether a frame that has waited since `since` may go on waiting for room at `node`, for up to `most`.
    pub fn may_wait(&mut self, node: u16, since: Instant, most: Duration) -> bool {
        let may = !self.0.contains(node) && since.elapsed() < most;
        if !may {
            self.0.insert(node);
        }
        may
    }

    /// Notes that `node` had room.
    #[inline]
    pub fn had_room(&mut self, node: u16) {
        self.0.remove(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_waited_for_in_vain_is_waited_for_again_once_it_has_had_room() {
        let (mut slow, now) = (Slow::default(), Instant::now() + Duration::from_secs(60));
        let Some(long_ago) = Instant::now().checked_sub(WAIT) else { return };
        assert!(slow.may_wait(1, now, WAIT) && slow.may_wait(1, now, WAIT));
        assert!(!slow.may_wait(1, long_ago, WAIT));
        assert!(!slow.may_wait(1, now, WAIT), "once");
        assert!(slow.may_wait(2, now, WAIT), "another is another");
        slow.had_room(1);
        assert!(slow.may_wait(1, now, WAIT));
    }
}
