//! The qtest socket: a line for each question and one for its answer, and between them lines that say what an interrupt pin does.
//!
//! INTA# of the card ends at an input of the machine's I/O APIC. QEMU is asked to tell us of its inputs, instead of the APIC; what it
//! tells becomes an eventfd as the kernel makes one of a pin: it rings, and then it is masked until somebody unmasks it. Whoever asks
//! reads what is told before the answer; while nobody asks, a thread does, which also sees to whoever unmasks.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use tasuki_net::nic::bus::IntX;

use super::{CARD, PATIENCE, readable};

/// The input of the I/O APIC that the card's INTA# leads to: PIRQ A to H are its inputs from 16 on, and INTA# of the devices in slot 0, 1, 2
/// and so on go to PIRQ E to H in turn (QEMU's hw/isa/lpc_ich9.c).
const INPUT: u8 = 16 + 4 + CARD % 4;

/// The connection to QEMU.
pub struct Qtest {
    stream: BufReader<UnixStream>,
    /// The card's interrupt pin, once somebody wants to know of it.
    pin: Option<Pin>,
}

/// A pin and what the kernel would make of it.
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

    /// The number in the answer to `command`, or 0 if there is none.
    pub fn ask(&mut self, command: &str) -> io::Result<u64> {
        self.stream.get_mut().write_all(command.as_bytes())?;
        self.stream.get_mut().write_all(b"\n")?;
        let line = loop {
            let line = self.line()?;
            if !self.hear(&line) {
                break line;
            }
        };
        // Whoever waits for the socket does not see what we have of it.
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

    /// Takes note of a line that says what a pin does; says whether it is one.
    fn hear(&mut self, line: &str) -> bool {
        let Some(news) = line.strip_prefix("IRQ ") else { return false };
        let Some(pin) = &mut self.pin else { return true };
        match news.trim_end().split_once(' ') {
            Some((verb, input)) if input.parse() == Ok(INPUT) => pin.set(verb == "raise", pin.masked),
            _ => {}
        }
        true
    }

    /// Hears what we have of the socket, and with `all`, what is in it.
    fn hear_all(&mut self, all: bool) -> io::Result<()> {
        while !self.stream.buffer().is_empty() || all && readable(self.stream.get_ref(), Duration::ZERO) {
            let line = self.line()?;
            if !self.hear(&line) {
                return Err(io::Error::other(format!("{line:?} answers nothing")));
            }
        }
        Ok(())
    }

    /// The card's interrupt pin, which from now on rings and is masked as the kernel does it.
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
        // Ends with QEMU.
        std::thread::spawn(move || while Self::attend(&qtest, &ours, &intx).is_ok() {});
        Ok(copy)
    }

    /// Waits for news, and sees to them.
    fn attend(qtest: &Mutex<Qtest>, stream: &UnixStream, intx: &IntX) -> io::Result<()> {
        let mut fds = [PollFd::new(stream, PollFlags::IN), PollFd::new(&intx.unmasks, PollFlags::IN)];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut this = qtest.lock().map_err(|_| io::Error::other("whoever asked has panicked"))?;
        // What answers somebody was read by them, who had the lock.
        this.hear_all(true)?;
        if let (Some(pin), Ok(_)) = (&mut this.pin, rustix::io::read(&intx.unmasks, &mut [0; 8])) {
            pin.set(pin.asserted, false);
        }
        Ok(())
    }
}
