//! Dice, where the tests of tasuki-net look for them.

pub use tasuki_testing::Dice;
