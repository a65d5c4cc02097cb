//! Cost of a driver alone: instructions per packet, as callgrind counts them, with a card that is memory.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// A figure: the tasuki-net example to run and its argument, the function to count, and which printed number is the
/// packet count.
struct Count {
    case: &'static str,
    program: &'static str,
    argument: &'static str,
    function: &'static str,
    printed: usize,
}

const COUNTS: [Count; 6] = [
    Count::new("e1000e-receive", "e1000e_instructions", "receive", "receive_and_release", 0),
    Count::new("e1000e-transmit", "e1000e_instructions", "transmit", "transmit_and_reclaim", 0),
    Count::new("virtio-net-receive", "cards_instructions", "virtio", "receive_and_release", 0),
    Count::new("virtio-net-transmit", "cards_instructions", "virtio", "transmit_and_reclaim", 1),
    Count::new("rtl8139-receive", "cards_instructions", "rtl8139", "receive_and_release", 0),
    Count::new("rtl8139-transmit", "cards_instructions", "rtl8139", "transmit_and_reclaim", 1),
];

impl Count {
    const fn new(
        case: &'static str,
        program: &'static str,
        argument: &'static str,
        function: &'static str,
        printed: usize,
    ) -> Self {
        Count { case, program, argument, function, printed }
    }

    /// Returns instructions per packet.
    fn measure(&self, folder: &Path) -> Result<f64> {
        let program = folder.join(self.program);
        ensure!(
            program.exists(),
            "{} is not built; build it: cargo build --release --package tasuki-net --examples",
            program.display()
        );
        let counted = format!("--toggle-collect={}::{}*", self.program, self.function);
        let run = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", &counted])
            .arg(&program)
            .arg(self.argument)
            .output()
            .context("valgrind does not start; install it: apt-get install valgrind")?;
        ensure!(run.status.success(), "valgrind ended with {}", run.status);
        let (said, counts) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
        let packets =
            numbers(&said).nth(self.printed).context("the program did not say how many packets there were")?;
        let collected = counts.lines().find_map(|line| line.split_once("Collected :"));
        let (_, collected) = collected.context("callgrind did not name its counts")?;
        let instructions = numbers(collected).next().context("callgrind counted nothing")?;
        ensure!(instructions > 0.0, "callgrind saw no {}: was it inlined?", self.function);
        Ok(instructions / packets)
    }
}

fn numbers(text: &str) -> impl Iterator<Item = f64> {
    text.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok())
}

/// Measures every figure; returns each by its name, with an error where it failed.
pub fn measure() -> Vec<(&'static str, Result<f64>)> {
    let folder =
        std::env::current_exe().map(|bench| bench.with_file_name("examples")).unwrap_or_else(|_| PathBuf::new());
    COUNTS.iter().map(|count| (count.case, count.measure(&folder))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_in_what_programs_say() {
        assert_eq!(numbers("32000 packets received, 31999 sent").collect::<Vec<_>>(), [32000.0, 31999.0]);
        assert_eq!(numbers(" 3769600").next(), Some(3_769_600.0));
        assert_eq!(numbers("none").next(), None);
    }
}
