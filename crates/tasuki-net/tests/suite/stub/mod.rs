//! Cards in memory that do nothing by themselves: the test plays the card, well or badly.

pub mod bus;
pub mod e1000e;
pub mod virtio;
