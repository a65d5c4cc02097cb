//! The qtest socket: a line for each request and a line for its reply, and between them lines about an interrupt
//! pin.
//!
//! INTA# of the card ends at an input of the machine's I/O APIC. QEMU reports its inputs to us instead of the APIC,
//! and we make an eventfd of them as the kernel makes one of a pin: it rings, and then it is masked until the driver
//! unmasks it. A thread that sends a request reads the reports before the reply. Otherwise a thread of its own reads
//! them, which also handles unmasking.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use tasuki_net::nic::bus::IntX;

use super::CARD;
use crate::wait::readable;
use tasuki_testing::PATIENCE;

/// Input of the I/O APIC for the card's INTA#: PIRQ A to H are its inputs from 16 on, and INTA# of the devices in
/// slots 0, 1, 2 and so on go to PIRQ E to H in turn (QEMU's hw/isa/lpc_ich9.c).
const INPUT: u8 = 16 + 4 + CARD % 4;

/// The connection to QEMU.
pub struct Qtest {
    stream: BufReader<UnixStream>,
    /// The card's interrupt pin, once a driver listens to it.
    pin: Option<Pin>,
}

/// The state of a pin as the kernel would keep it.
struct Pin {
    asserted: bool,
    masked: bool,
    intx: IntX,
}

impl Pin {
    fn set(&mut self, asserted: bool, masked: bool) {
        (self.asserted, self.masked) = (asserted, masked);
        if asserted && !masked {
            self.masked = true;
            rustix::io::write(&self.intx.rings, &1_u64.to_ne_bytes()).expect("an eventfd has room for one more");
        }
    }
}

impl Qtest {
    pub fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout above zero");
        Qtest { stream: BufReader::new(stream), pin: None }
    }

    /// Sends `command`; returns the number in the reply, or 0 if there is none.
    pub fn ask(&mut self, command: &str) -> io::Result<u64> {
        self.stream.get_mut().write_all(command.as_bytes())?;
        self.stream.get_mut().write_all(b"\n")?;
        let line = loop {
            let line = self.line()?;
            if !self.hear(&line) {
                break line;
            }
        };
        // A thread that polls the socket does not see the lines in our buffer.
        self.hear_all(false)?;
        let mut words = line.split_ascii_whitespace();
        if words.next() != Some("OK") {
            return Err(io::Error::other(format!("{command} was answered {line:?}")));
        }
        let Some(number) = words.next() else { return Ok(0) };
        let digits = number.trim_start_matches("0x");
        u64::from_str_radix(digits, 16).map_err(|_| io::Error::other(format!("{number} is no number")))
    }

    fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.stream.read_line(&mut line).map(|_| line)
    }

    /// Handles a line about a pin; returns whether it is one.
    fn hear(&mut self, line: &str) -> bool {
        let Some(news) = line.strip_prefix("IRQ ") else { return false };
        let Some(pin) = &mut self.pin else { return true };
        match news.trim_end().split_once(' ') {
            Some((verb, input)) if input.parse() == Ok(INPUT) => pin.set(verb == "raise", pin.masked),
            _ => {}
        }
        true
    }

    /// Handles the lines in our buffer and, with `all`, those in the socket.
    fn hear_all(&mut self, all: bool) -> io::Result<()> {
        while !self.stream.buffer().is_empty() || all && readable(self.stream.get_ref(), Duration::ZERO) {
            let line = self.line()?;
            if !self.hear(&line) {
                return Err(io::Error::other(format!("{line:?} answers nothing")));
            }
        }
        Ok(())
    }

    /// Returns the card's interrupt pin, which from now on rings and is masked as with the kernel.
    pub fn listen(qtest: &Arc<Mutex<Qtest>>) -> io::Result<IntX> {
        let mut this = qtest.lock().expect("nobody panics while asking");
        if let Some(pin) = &this.pin {
            return pin.intx.try_clone();
        }
        let (intx, ours) = (IntX::create()?, this.stream.get_ref().try_clone()?);
        let copy = intx.try_clone()?;
        this.pin = Some(Pin { asserted: false, masked: false, intx: intx.try_clone()? });
        this.ask("irq_intercept_in ioapic")?;
        let qtest = Arc::clone(qtest);
        // The thread ends with QEMU.
        std::thread::spawn(move || while Self::attend(&qtest, &ours, &intx).is_ok() {});
        Ok(copy)
    }

    /// Waits for a report or an unmask request, and handles it.
    fn attend(qtest: &Mutex<Qtest>, stream: &UnixStream, intx: &IntX) -> io::Result<()> {
        let mut fds = [PollFd::new(stream, PollFlags::IN), PollFd::new(&intx.unmasks, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut this = qtest.lock().map_err(|_| io::Error::other("whoever asked has panicked"))?;
        // Only reports are left: a thread that sends a request holds the lock until it has read the reply.
        this.hear_all(true)?;
        if let (Some(pin), Ok(_)) = (&mut this.pin, rustix::io::read(&intx.unmasks, &mut [0; 8])) {
            pin.set(pin.asserted, false);
        }
        Ok(())
    }
}
