//! `iperf3` and its report of sent and received data.

use std::io::Read;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use crate::interrupt::Interrupt;
use crate::program::Program;

/// Name of the program for error messages.
const NAME: &str = "iperf3";

/// A listening `iperf3`. Dropping it ends the program.
pub struct Server {
    _program: Program,
}

impl Server {
    /// Starts `command`, which ends with the name `iperf3`, as the listener.
    pub fn start(command: &mut Command, interrupt: &Interrupt) -> Result<Self> {
        // Flush each line at once instead of after a full pipe buffer.
        let mut program = Program::start_as(NAME, command.args(["--server", "--forceflush"]))?;
        program.await_words("Server listening", interrupt)?;
        Ok(Server { _program: program })
    }
}

/// A sending `iperf3`.
pub struct Sending(Program);

impl Sending {
    /// Starts `command`, which ends with the name `iperf3`, as the sender to `server`.
    pub fn begin(command: &mut Command, server: &str) -> Result<Self> {
        Ok(Sending(Program::start_as(NAME, command.args(["--client", server, "--json"]))?))
    }

    /// Waits until `iperf3` has sent everything, and returns its report.
    pub fn end(mut self, interrupt: &Interrupt) -> Result<Said> {
        // Read while `iperf3` runs: its final report need not fit a pipe.
        let mut pipe = self.0.output()?;
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            pipe.read_to_string(&mut text).map(|_| text)
        });
        self.0.await_end(interrupt)?;
        let text = reader.join().map_err(|_| anyhow!("the thread that reads iperf3's output panicked"))??;
        Said::read(&text)
    }
}

/// Final report of `iperf3`.
#[derive(Debug)]
pub struct Said(Value);

impl Said {
    /// Parses the output of `--json`.
    pub fn read(text: &str) -> Result<Self> {
        let said: Value = serde_json::from_str(text).context("iperf3's output is not JSON")?;
        match said["error"].as_str() {
            Some(error) => Err(anyhow!("iperf3: {error}")),
            None => Ok(Said(said)),
        }
    }

    /// Returns the number at `place` (a JSON pointer).
    pub fn number(&self, place: &str) -> Result<f64> {
        let number = self.0.pointer(place).and_then(Value::as_f64);
        number.with_context(|| format!("iperf3's report has no number at {place}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_iperf3_says_is_read() {
        let text = r#"{"start": {}, "intervals": [], "end": {
            "streams": [{"sender": {"bytes": 25000000, "max_rtt": 2710, "min_rtt": 90}, "receiver": {}}],
            "sum_sent": {"bytes": 25000000, "bits_per_second": 200000000.5, "retransmits": 3, "sender": true}}}"#;
        let said = Said::read(text).expect("a report of 3.12");
        let numbers =
            ["/end/sum_sent/bits_per_second", "/end/streams/0/sender/max_rtt"].map(|at| said.number(at).unwrap());
        assert_eq!(numbers, [200_000_000.5, 2710.0]);
        assert!(said.number("/end/sum_received/bytes").unwrap_err().to_string().contains("/end/sum_received/bytes"));
        let error = Said::read(r#"{"end": {}, "error": "unable to connect to server: No route to host"}"#);
        assert!(error.expect_err("it failed").to_string().contains("No route to host"));
        assert!(Said::read("iperf3: parameter error").is_err());
    }
}
