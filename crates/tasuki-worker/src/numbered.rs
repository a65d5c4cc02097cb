//! Frames that carry their number, and an account of them. Their layout is that of docs/design/sim.md, so that the
//! model's source and this worker understand each other's frames.

use tasuki_net::nic::Mac;

const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// "tsk", and the version of the layout.
const MARK: [u8; 4] = *b"tsk\x01";
/// Length in bytes up to and including the number and the time.
const NUMBERED_LEN: usize = 34;

/// Minimum length of a frame in bytes, without check sequence (IEEE 802.3, 3.2.8).
pub const SHORTEST: u16 = 60;

/// Writes frame number `number` over all of `bytes`, which must be at least [`SHORTEST`] long.
pub fn write(bytes: &mut [u8], to: Mac, from: Mac, number: u64) {
    bytes[0..6].copy_from_slice(&to.0);
    bytes[6..12].copy_from_slice(&from.0);
    bytes[12..14].copy_from_slice(&ETHERTYPE);
    bytes[14..18].copy_from_slice(&MARK);
    bytes[18..26].copy_from_slice(&number.to_le_bytes());
    // The time stays 0: no receiver here measures the latency.
    bytes[26..].fill(0);
}

/// Returns the number of a numbered frame, from any sender.
pub fn number(bytes: &[u8]) -> Option<u64> {
    let (kind, rest) = bytes.get(12..NUMBERED_LEN)?.split_first_chunk::<2>()?;
    let (mark, rest) = rest.split_first_chunk::<4>()?;
    (*kind == ETHERTYPE && *mark == MARK).then(|| rest.first_chunk().copied().map(u64::from_le_bytes))?
}

/// Account of numbered frames.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Number of numbered frames seen.
    pub seen: u64,
    /// Count of numbers that were passed over, less those that arrived late.
    pub missing: u64,
    /// Count of frames whose number is below one seen before.
    pub late: u64,
    /// Number that is due next.
    pub next: u64,
}

impl Account {
    /// Counts a frame with this number. Returns how many numbers were passed over.
    pub fn count(&mut self, number: u64) -> u64 {
        self.seen += 1;
        let Some(passed_over) = number.checked_sub(self.next) else {
            self.late += 1;
            self.missing = self.missing.saturating_sub(1);
            return 0;
        };
        self.next = number + 1;
        // Numbers before the first frame that we see are not missing.
        let passed_over = if self.seen == 1 { 0 } else { passed_over };
        self.missing += passed_over;
        passed_over
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
        assert_eq!([5, 6, 9, 7, 10].map(|number| account.count(number)), [0, 0, 2, 0, 0]);
        assert_eq!(account, Account { seen: 5, missing: 1, late: 1, next: 11 });
    }
}
