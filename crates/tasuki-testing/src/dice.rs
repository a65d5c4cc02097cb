//! Pseudorandom numbers that a seed reproduces.

/// A source of pseudorandom numbers.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// Takes the seed from `TASUKI_SEED`, or a new one from the clock. Prints the seed.
    pub fn new(what: &str) -> Self {
        let fresh = || {
            std::time::UNIX_EPOCH.elapsed().map_or(1, |since| u64::from(since.subsec_nanos()) << 32 | since.as_secs())
        };
        let seed = std::env::var("TASUKI_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(fresh);
        println!("{what}: TASUKI_SEED={seed}");
        Dice(seed)
    }

    /// Takes this seed.
    pub fn of(seed: u64) -> Self {
        Dice(seed)
    }

    /// Returns any number. SplitMix64 (Steele, Lea, Flood 2014).
    #[expect(clippy::should_implement_trait, reason = "it never ends, so an iterator's `Option` would say nothing")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("below end")
    }

    /// Returns true once in `times` on average.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// Returns one of these values.
    pub fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }
}
