//! What users hear of the link of a card, or of a Linux interface. A card's driver says how the link is, and may lie; the
//! owner of an interface's namespace may take it down and up all the time.

use std::time::Duration;

use crate::bucket::Bucket;

/// For this long a link is down before users are told: a card that was just started needs 2.2 s.
const TOLD_AFTER: Duration = Duration::from_secs(4);
/// Remedy where a link has no carrier.
pub const LOOK_AT_CABLE: &str = "look at its cable, and at the other end";
/// How often users hear that it goes down, at once, and after that.
const AT_ONCE_MAX: u32 = 5;
const EVERY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub struct LinkNews {
    /// Since when the link is down, and whether that was told.
    down: Option<(Duration, bool)>,
    told: Bucket,
}

impl LinkNews {
    pub fn new(now: Duration) -> Self {
        LinkNews { down: None, told: Bucket::new(AT_ONCE_MAX, EVERY, now) }
    }

    /// Takes note of the link: `up`, `down`, or not known. Returns the news, as the end of a sentence that begins with the
    /// link, with what is to be done if it is down.
    pub fn look(&mut self, link: Option<&str>, remedy: &str, now: Duration) -> Option<String> {
        match (link, self.down) {
            (Some("down"), None) => self.down = Some((now, false)),
            (Some("down"), Some((since, false))) if now.saturating_sub(since) >= TOLD_AFTER => {
                let is_told = self.told.take(now);
                self.down = Some((since, is_told));
                return is_told.then(|| format!("is down; {remedy}"));
            }
            (Some("up"), Some((since, is_told))) => {
                self.down = None;
                let seconds = now.saturating_sub(since).as_secs();
                return is_told.then(|| format!("is up again, after {seconds} s"));
            }
            // Another driver may start the card anew.
            (None, Some((_, false))) => self.down = None,
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the news of looks at these times, in s.
    fn news(news: &mut LinkNews, looks: &[(u64, Option<&str>)]) -> Vec<String> {
        looks.iter().filter_map(|(at, link)| news.look(*link, LOOK_AT_CABLE, Duration::from_secs(*at))).collect()
    }

    #[test]
    fn a_link_that_is_down_is_told_of_once_and_so_is_its_return() {
        let (up, down) = (Some("up"), Some("down"));
        let mut its = LinkNews::new(Duration::ZERO);
        assert!(
            news(&mut its, &[(0, down), (3, down), (4, up), (5, down), (6, None), (7, down), (10, down)]).is_empty()
        );
        let said = news(&mut its, &[(11, down), (12, down), (13, None), (19, up), (20, up)]);
        assert_eq!(said, ["is down; look at its cable, and at the other end", "is up again, after 12 s"]);
    }

    /// row: T145
    #[test]
    fn a_driver_that_tells_what_it_likes_of_its_link_cannot_fill_the_events() {
        let mut its = LinkNews::new(Duration::ZERO);
        let looks: Vec<_> = (0..3600).map(|at| (at, Some(if at % 6 == 5 { "up" } else { "down" }))).collect();
        // In an hour, each with its return.
        let most = 2 * (u64::from(AT_ONCE_MAX) + 3600 / EVERY.as_secs());
        let said = news(&mut its, &looks).len() as u64;
        assert!((1..=most).contains(&said), "{said} of {most}");
    }
}
