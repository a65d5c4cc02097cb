//! The paper's own measurement (S2): ten sends and receives of 15,000 bytes between two namespaces, and the bytes over the
//! time spent in `recv`.
//!
//! The paper does not say whether its receiver waits in `recv` for what is still to come. We measure both: a receiver that
//! does, and one that begins when all has arrived, whose rate is that of the copy out of the kernel.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::net::sockopt::set_socket_recv_buffer_size_force;
use tasuki_tap::namespace::Namespace;

use super::netns::{Namespaces, Traffic};
use crate::cpus;
use crate::interrupt::Interrupt;
use crate::sample::median;

/// Bytes of a send, and number of sends of a trial, as in the paper.
const LEN: usize = 15_000;
const SENDS: usize = 10;

/// Room for all sends of a trial, with what the kernel needs for each frame of them.
const ROOM: usize = 4 << 20;

/// Time after which all sends have arrived.
const ARRIVED: Duration = Duration::from_millis(3);

/// Time after which what has not arrived is lost.
const LOST: Duration = Duration::from_millis(300);

const PORT: u16 = 5203;

/// Rates in bits a second, one value for each trial.
#[derive(Debug, Default)]
pub struct Received {
    /// With a receiver that waits in `recv`.
    pub waiting: Vec<f64>,
    /// With one that begins when all has arrived.
    pub arrived: Vec<f64>,
    /// Number of trials that lost some of their bytes, as UDP may. They have no rate.
    pub lost: u32,
}

/// The two ends of a connection.
enum Ends {
    Tcp(TcpStream, TcpStream),
    Udp(UdpSocket, UdpSocket),
}

impl Ends {
    fn between(namespaces: &Namespaces, traffic: Traffic) -> Result<Self> {
        let place = |end: usize| Namespace::named(&namespaces.names()[end]);
        let address = |end: usize| (Ipv4Addr::from(Namespaces::ADDRESSES[end]), PORT);
        let no_socket = "the kernel gave no socket in a namespace";
        match traffic {
            Traffic::Tcp => {
                let listener = place(1).within(|| Ok(TcpListener::bind(address(1))))?.context(no_socket)?;
                set_socket_recv_buffer_size_force(&listener, ROOM)?;
                let sender = place(0).within(|| Ok(TcpStream::connect(address(1))))?.context(no_socket)?;
                sender.set_nodelay(true)?;
                let (receiver, _) = listener.accept().context("the connection did not come")?;
                receiver.set_read_timeout(Some(LOST))?;
                Ok(Ends::Tcp(sender, receiver))
            }
            Traffic::Udp => {
                let open = |end: usize| -> Result<UdpSocket> {
                    let opened = place(end).within(|| {
                        Ok(UdpSocket::bind(address(end)).and_then(|it| it.connect(address(1 - end)).map(|()| it)))
                    })?;
                    opened.context(no_socket)
                };
                let (sender, receiver) = (open(0)?, open(1)?);
                set_socket_recv_buffer_size_force(&receiver, ROOM)?;
                receiver.set_read_timeout(Some(LOST))?;
                Ok(Ends::Udp(sender, receiver))
            }
        }
    }

    /// Splits the ends into what sends a trial's bytes and what receives some of them.
    #[expect(clippy::type_complexity, reason = "two closures, used once")]
    fn split(
        self,
    ) -> (Box<dyn FnMut(&[u8]) -> std::io::Result<()> + Send>, Box<dyn FnMut(&mut [u8]) -> std::io::Result<usize> + Send>)
    {
        match self {
            Ends::Tcp(mut sender, mut receiver) => {
                (Box::new(move |bytes| sender.write_all(bytes)), Box::new(move |room| receiver.read(room)))
            }
            Ends::Udp(sender, receiver) => {
                (Box::new(move |bytes| sender.send(bytes).map(|_| ())), Box::new(move |room| receiver.recv(room)))
            }
        }
    }
}

/// Measures `trials` of each kind between two namespaces; the receiver is on the second CPU.
pub fn measure(
    namespaces: &Namespaces,
    traffic: Traffic,
    trials: usize,
    [sends_on, receives_on]: [usize; 2],
    interrupt: &Interrupt,
) -> Result<Received> {
    let (mut send, mut receive) = Ends::between(namespaces, traffic)?.split();
    let (begin, began) = mpsc::channel::<()>();
    let (tell, sent) = mpsc::channel();
    std::thread::scope(|scope| {
        let sender = scope.spawn(move || -> Result<()> {
            cpus::pin(sends_on)?;
            let message = [0x5a; LEN];
            while began.recv().is_ok() {
                for _ in 0..SENDS {
                    send(&message).context("15,000 bytes could not be sent")?;
                }
                if tell.send(()).is_err() {
                    break;
                }
            }
            Ok(())
        });
        let measured = scope.spawn(move || -> Result<Received> {
            cpus::pin(receives_on)?;
            let mut received = Received::default();
            for trial in 0..2 * trials {
                interrupt.check()?;
                let waits = trial % 2 == 0;
                begin.send(()).map_err(|_| anyhow!("the sender ended"))?;
                if !waits {
                    sent.recv().map_err(|_| anyhow!("the sender ended"))?;
                    std::thread::sleep(ARRIVED);
                }
                let rate = one(&mut receive)?;
                if waits {
                    sent.recv().map_err(|_| anyhow!("the sender ended"))?;
                }
                match (rate, waits) {
                    (Some(rate), true) => received.waiting.push(rate),
                    (Some(rate), false) => received.arrived.push(rate),
                    (None, _) => received.lost += 1,
                }
            }
            Ok(received)
        });
        let measured = measured.join().map_err(|_| anyhow!("the receiver panicked"))?;
        sender.join().map_err(|_| anyhow!("the sender panicked"))??;
        measured
    })
}

/// Receives all bytes of a trial. Returns their number over the time in `recv`, in bits a second; `None` if some are lost.
fn one(receive: &mut impl FnMut(&mut [u8]) -> std::io::Result<usize>) -> Result<Option<f64>> {
    let (mut room, mut bytes, mut inside) = (vec![0; LEN], 0, Duration::ZERO);
    while bytes < LEN * SENDS {
        let start = Instant::now();
        let len = match receive(&mut room) {
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error).context("15,000 bytes could not be received"),
        };
        inside += start.elapsed();
        ensure!(len > 0, "the sender hung up");
        bytes += len;
    }
    Ok(Some(bytes as f64 * 8.0 / inside.as_secs_f64()))
}

impl Received {
    /// Returns the medians: of the waiting receiver, and of the other, in bits a second.
    pub fn medians(&self) -> Result<[f64; 2]> {
        let of = |rates: &[f64]| {
            median(rates)
                .context("every trial of ten receives lost some of its bytes: this machine is too busy to tell")
        };
        Ok([of(&self.waiting)?, of(&self.arrived)?])
    }
}
