//! Frames that carry their number, and what became of them.
//!
//! | bytes   | what                                                    |
//! |---------|---------------------------------------------------------|
//! | 0 to 5  | whom it is for                                          |
//! | 6 to 11 | who sent it                                             |
//! | 12, 13  | 88 b5: local experimental EtherType 1 (IEEE 802, 9.2.4) |
//! | 14 – 17 | "tsuk"                                                  |
//! | 18 – 25 | number, from 0, little endian                           |

use tasuki_net::nic::Mac;

const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
const MAGIC: [u8; 4] = *b"tsuk";

/// Bytes that a frame needs at least, without check sequence (IEEE 802.3, 3.2.8).
pub const SHORTEST: u16 = 60;

/// Writes frame number `number` over all of `bytes`, which are [`SHORTEST`] at least.
pub fn write(bytes: &mut [u8], to: Mac, from: Mac, number: u64) {
    bytes[0..6].copy_from_slice(&to.0);
    bytes[6..12].copy_from_slice(&from.0);
    bytes[12..14].copy_from_slice(&ETHERTYPE);
    bytes[14..18].copy_from_slice(&MAGIC);
    bytes[18..26].copy_from_slice(&number.to_le_bytes());
    bytes[26..].fill(0);
}

/// The number of a frame that we numbered.
pub fn number(bytes: &[u8]) -> Option<u64> {
    let ours = bytes.get(12..18).is_some_and(|head| head[..2] == ETHERTYPE && head[2..] == MAGIC);
    ours.then(|| bytes.get(18..26)?.try_into().ok().map(u64::from_le_bytes))?
}

/// What became of numbered frames.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Numbered frames seen.
    pub seen: u64,
    /// Numbers that were passed over, less those that came late.
    pub missing: u64,
    /// Frames whose number is below one seen before.
    pub late: u64,
    next: u64,
}

impl Account {
    /// Books a frame.
    pub fn book(&mut self, number: u64) {
        self.seen += 1;
        match number.checked_sub(self.next) {
            Some(passed_over) => {
                // What was before we began to look is nobody's loss.
                self.missing += if self.seen == 1 { 0 } else { passed_over };
                self.next = number + 1;
            }
            None => {
                self.late += 1;
                self.missing = self.missing.saturating_sub(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_says_its_number() {
        let mut bytes = [0xff; 60];
        write(&mut bytes, Mac([1; 6]), Mac([2; 6]), 77);
        assert_eq!(number(&bytes), Some(77));
        assert_eq!(number(&bytes[..20]), None);
        assert_eq!(number(&[0; 60]), None);
    }

    #[test]
    fn losses_are_counted_and_what_comes_late_is_not_lost() {
        let mut account = Account::default();
        for number in [5, 6, 9, 7, 10] {
            account.book(number);
        }
        assert_eq!(account, Account { seen: 5, missing: 1, late: 1, next: 11 });
    }
}
