//! Who is waited for, and who is not any more: so that a node without room holds up the frames behind its own once, and only for a moment.

use std::time::{Duration, Instant};

use tasuki_shm::vni::directory::NodeSet;

/// How long a frame waits for somebody who has no room for it, and all behind it with it.
pub const WAIT: Duration = Duration::from_millis(2);

/// Nodes that were waited for in vain, and have had no room since.
#[derive(Debug, Default)]
pub struct Slow(NodeSet);

impl Slow {
    /// Whether a frame is to wait for `node`, which has no room for it, if it has waited since then.
    pub fn may_wait(&mut self, node: u16, since: Instant) -> bool {
        self.may_wait_for(node, since, WAIT)
    }

    /// The same, if it may wait for so long.
    pub fn may_wait_for(&mut self, node: u16, since: Instant, most: Duration) -> bool {
        let may = !self.0.contains(node) && since.elapsed() < most;
        if !may {
            self.0.insert(node);
        }
        may
    }

    /// `node` had room.
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
        assert!(slow.may_wait(1, now) && slow.may_wait(1, now));
        assert!(!slow.may_wait(1, long_ago));
        assert!(!slow.may_wait(1, now), "once");
        assert!(slow.may_wait(2, now), "another is another");
        slow.had_room(1);
        assert!(slow.may_wait(1, now));
    }
}
