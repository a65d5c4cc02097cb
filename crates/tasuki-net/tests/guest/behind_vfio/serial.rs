//! Connections from the guest to the outside: ports of a virtio-serial device, which QEMU connects by their names.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use tasuki_testing::{PATIENCE, polled};

/// Most frames under way to the card's end of a wire. A port of the guest has room for more.
const UNDER_WAY: u64 = 64;

/// A port that behaves like a blocking file. (The driver's own blocking calls would wait for room with interrupts
/// off.)
struct Port(File);

impl Port {
    /// Opens the port of this name, once it exists.
    fn open(name: &str) -> Port {
        let named = || {
            let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
            let mut ports = ports.map(|port| port.expect("a folder of the kernel's").path());
            ports.find(|port| fs::read_to_string(port.join("name")).is_ok_and(|its| its.trim() == name))
        };
        let port = polled(name, named);
        let file = std::path::Path::new("/dev").join(port.file_name().expect("a name"));
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        let open = || OpenOptions::new().read(true).write(true).custom_flags(nonblocking).open(&file).ok();
        Port(polled("a port that nobody else has", open))
    }

    fn wait_for(&self, what: PollFlags) -> io::Result<()> {
        match rustix::event::poll(&mut [PollFd::new(&self.0, what)], None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Read for &Port {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match (&self.0).read(into) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for(PollFlags::IN)?,
                done => return done,
            }
        }
    }
}

impl Write for &Port {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match (&self.0).write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.wait_for(PollFlags::OUT)?,
                done => return done,
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The other end of a card's wire. It exists as long as the process does; xtask/src/guest/wire.rs defines its
/// protocol.
pub struct Wire {
    port: Port,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Frames sent, and the number of them that the card's end has taken.
    sent: u64,
    taken: u64,
    /// Frames that the card has put on the wire.
    come: VecDeque<Vec<u8>>,
}

/// The wires in use.
static WIRES: Mutex<Vec<(&str, &Wire)>> = Mutex::new(Vec::new());

impl Wire {
    /// Returns the wire of this name.
    pub fn of(name: &'static str) -> &'static Wire {
        let mut wires = WIRES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, wire)) = wires.iter().find(|(known, _)| *known == name) {
            return wire;
        }
        let wire: &Wire =
            Box::leak(Box::new(Wire { port: Port::open(name), state: Mutex::default(), changed: Condvar::new() }));
        wires.push((name, wire));
        std::thread::spawn(|| {
            let error = wire.listen().expect_err("it listens for ever");
            panic!("the wire's other end is gone: {error}");
        });
        wire
    }

    fn listen(&self) -> io::Result<()> {
        let mut port = BufReader::with_capacity(64 << 10, &self.port);
        loop {
            let mut len = [0; 4];
            port.read_exact(&mut len)?;
            let mut frame = vec![0; u32::from_be_bytes(len) as usize];
            port.read_exact(&mut frame)?;
            let mut state = self.lock();
            if frame.is_empty() {
                state.taken += 1;
            } else {
                state.come.push_back(frame);
            }
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the state is as wanted, or for `limit`; returns the state.
    fn wait(&self, limit: Duration, wanted: impl Fn(&State) -> bool) -> std::sync::MutexGuard<'_, State> {
        let deadline = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if wanted(&state) || left.is_zero() {
                return state;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Clears the wire for a fresh card. No frame may be under way.
    pub fn clear(&self) {
        let mut state = self.wait(PATIENCE, |state| state.taken == state.sent);
        assert_eq!(state.taken, state.sent, "a test before this one has left frames on the wire");
        state.come.clear();
    }

    /// Puts a frame on the wire, if there is room; returns whether there was.
    pub fn try_send(&self, frame: &[u8]) -> bool {
        Self::put(&self.port, &mut self.lock(), frame)
    }

    /// Puts a frame on the wire; waits for room.
    pub fn send(&self, frame: &[u8]) {
        let has_room = |state: &State| state.sent - state.taken < UNDER_WAY;
        let sent = Self::put(&self.port, &mut self.wait(PATIENCE, has_room), frame);
        assert!(sent, "no room on the wire");
    }

    fn put(mut port: &Port, state: &mut State, frame: &[u8]) -> bool {
        if state.sent - state.taken >= UNDER_WAY {
            return false;
        }
        let len = u32::try_from(frame.len()).expect("a frame").to_be_bytes();
        // One write, so that the port's driver gets one buffer.
        port.write_all(&[&len, frame].concat()).expect("the wire's other end is there");
        state.sent += 1;
        true
    }

    /// Returns the next frame that the card has put on the wire, if it comes within `limit`.
    pub fn take(&self, limit: Duration) -> Option<Vec<u8>> {
        self.wait(limit, |state| !state.come.is_empty()).come.pop_front()
    }

    /// Waits until the card's end has taken all but `left` of the sent frames.
    pub fn wait_until_taken(&self, left: u64) {
        let wanted = |state: &State| state.sent - state.taken <= left;
        assert!(wanted(&self.wait(PATIENCE, wanted)), "the card's end takes no frames");
    }
}

/// QEMU's monitor, after its first use.
static MONITOR: Mutex<Option<BufReader<&Port>>> = Mutex::new(None);

/// Sends a command to QEMU's monitor, which speaks JSON: <https://www.qemu.org/docs/master/interop/qmp-spec.html>.
/// Waits for the answer.
pub fn ask(command: &str) {
    let mut monitor = MONITOR.lock().unwrap_or_else(PoisonError::into_inner);
    match &mut *monitor {
        Some(monitor) => talk(monitor, command),
        none => {
            let monitor = none.insert(BufReader::new(Box::leak(Box::new(Port::open("monitor")))));
            talk(monitor, r#"{"execute":"qmp_capabilities"}"#);
            talk(monitor, command);
        }
    }
}

/// Waits for the answer, past the monitor's own messages.
fn talk(monitor: &mut BufReader<&Port>, command: &str) {
    monitor.get_mut().write_all(format!("{command}\n").as_bytes()).expect("the monitor listens");
    let mut line = String::new();
    loop {
        line.clear();
        let len = monitor.read_line(&mut line).expect("the monitor answers");
        assert!(len > 0 && !line.contains(r#""error""#), "{command} was answered {line:?}");
        if line.contains(r#""return""#) {
            return;
        }
    }
}
