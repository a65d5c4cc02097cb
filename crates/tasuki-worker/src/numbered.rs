//! Frames that carry their number, and what became of them. Their layout is that of docs/design/sim.md, so that the model's source and
//! we understand each other's.

use tasuki_net::nic::Mac;

const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// "tsk", and the version of the layout.
const MARK: [u8; 4] = *b"tsk\x01";
/// Bytes up to and with the number and the time.
const NUMBERED_LEN: usize = 34;

/// Bytes that a frame needs at least, without check sequence (IEEE 802.3, 3.2.8).
pub const SHORTEST: u16 = 60;

/// Writes frame number `number` over all of `bytes`, which are [`SHORTEST`] at least.
pub fn write(bytes: &mut [u8], to: Mac, from: Mac, number: u64) {
    bytes[0..6].copy_from_slice(&to.0);
    bytes[6..12].copy_from_slice(&from.0);
    bytes[12..14].copy_from_slice(&ETHERTYPE);
    bytes[14..18].copy_from_slice(&MARK);
    bytes[18..26].copy_from_slice(&number.to_le_bytes());
    // No time: nobody here asks how long it took.
    bytes[26..].fill(0);
}

/// The number of a frame that was numbered, by whomever.
pub fn number(bytes: &[u8]) -> Option<u64> {
    let (kind, rest) = bytes.get(12..NUMBERED_LEN)?.split_first_chunk::<2>()?;
    let (mark, rest) = rest.split_first_chunk::<4>()?;
    (*kind == ETHERTYPE && *mark == MARK).then(|| rest.first_chunk().copied().map(u64::from_le_bytes))?
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
    /// The number that is due.
    pub next: u64,
}

impl Account {
    /// Program states a frame.
    pub fn program_state(&mut self, number: u64) {
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
        assert_eq!(number(&bytes[..33]), None);
        assert_eq!(number(&[0; 60]), None);
    }

    #[test]
    fn a_frame_is_laid_out_as_the_document_says() {
        let mut bytes = [0xff; 60];
        write(&mut bytes, Mac([1; 6]), Mac([2; 6]), 0x0102);
        let head = [&[1; 6][..], &[2; 6], &[0x88, 0xb5], &[0x74, 0x73, 0x6b, 0x01], &[2, 1, 0, 0, 0, 0, 0, 0]].concat();
        assert_eq!(bytes[..26], head);
        assert_eq!(bytes[26..], [0; 34]);
    }

    #[test]
    fn losses_are_counted_and_what_comes_late_is_not_lost() {
        let mut account = Account::default();
        for number in [5, 6, 9, 7, 10] {
            account.program_state(number);
        }
        assert_eq!(account, Account { seen: 5, missing: 1, late: 1, next: 11 });
    }
}
