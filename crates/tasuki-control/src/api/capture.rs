//! A capture on its way to its reader: batches from workers are checked and passed on as pcapng. This runs on the
//! HTTP thread, and no worker waits for it: if the reader is too slow, workers drop frames and count them.

use std::convert::Infallible;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::body::{Body, Bytes, Frame};
use rustix::net::RecvFlags;
use tokio::net::UnixDatagram;
use tokio::sync::mpsc::UnboundedReceiver;

use super::pcapng;
use crate::supervisor::door::{Door, Request};
use crate::supervisor::worker::Words;

/// Bytes passed on at a time, or a batch more.
const CHUNK_LEN: usize = 64 << 10;

/// Bytes of a worker's longest batch: the longest frame of a VNI, with its block.
const BATCH_MAX: usize = 128 << 10;

/// Batches passed on after the end: at most those under way, even if a worker goes on.
const LAST_BATCHES_MAX: usize = 1 << 13;

/// Time workers may take to begin.
const BEGIN_TIMEOUT: Duration = Duration::from_secs(1);

/// A message from the daemon's loop about a capture under way. When its channel closes, the capture is over.
#[derive(Debug)]
pub struct Port {
    /// Name of the next port.
    pub name: String,
    /// Station address of the port, if it is known.
    pub mac: Option<[u8; 6]>,
}

/// Tells the daemon's loop when the reader is gone.
#[derive(Debug)]
pub struct Gone {
    door: Door,
    number: u32,
    frames: u64,
    missed: u64,
}

impl Gone {
    /// Creates the notice for this capture.
    pub fn new(door: Door, number: u32) -> Self {
        Gone { door, number, frames: 0, missed: 0 }
    }
}

impl Drop for Gone {
    fn drop(&mut self) {
        let Gone { number, frames, missed, .. } = *self;
        self.door.put(Request::CaptureOver { number, frames, missed });
    }
}

/// A capture that has begun.
#[derive(Debug)]
pub struct Begun {
    /// Number of the capture.
    pub number: u32,
    /// The receiving end of the workers' batches.
    pub batches: OwnedFd,
    /// A word for each port: the number of frames missed.
    pub missed: Arc<Words>,
    /// The ports, as the daemon's loop names them.
    pub ports: UnboundedReceiver<Port>,
    /// Number of workers told, counted port by port.
    pub told: usize,
    /// Bytes that are kept of a frame.
    pub snap: u32,
    /// Tells the loop of the capture's end.
    pub gone: Gone,
}

/// How far the capture has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Under way.
    Runs,
    /// No new batch is wanted; this many may still be under way.
    Ends(usize),
    /// The last block is written.
    Over,
}

/// The answer's body.
#[derive(Debug)]
pub struct Capture {
    /// A `SOCK_SEQPACKET` socket: it keeps the bounds of messages, and is read like a datagram socket.
    batches: UnixDatagram,
    missed: Arc<Words>,
    ports: UnboundedReceiver<Port>,
    snap: u32,
    gone: Gone,
    stage: Stage,
    /// Frames still wanted.
    most: u64,
    since: u64,
    /// Frames of each port.
    counts: Vec<u64>,
    /// Number of malformed messages.
    odd: u64,
    /// How often a worker said that it has begun.
    begun: usize,
    room: Box<[u8]>,
    out: Vec<u8>,
}

fn now_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Capture {
    /// Begins a capture that ends after `most` frames. Returns when all workers have said that they have begun, or
    /// after `BEGIN_TIMEOUT`.
    pub async fn begin(begun: Begun, most: Option<u64>) -> std::io::Result<Self> {
        let Begun { batches, missed, ports, told, snap, gone, .. } = begun;
        let batches = std::os::unix::net::UnixDatagram::from(batches);
        batches.set_nonblocking(true)?;
        let mut capture = Capture {
            batches: UnixDatagram::from_std(batches)?,
            missed,
            ports,
            snap,
            gone,
            stage: Stage::Runs,
            most: most.unwrap_or(u64::MAX),
            since: now_ns(),
            counts: Vec::new(),
            odd: 0,
            begun: 0,
            room: vec![0; BATCH_MAX].into(),
            out: pcapng::section(),
        };
        let all = std::future::poll_fn(|cx| {
            capture.gather(cx);
            let goes_on = capture.begun < told && capture.stage == Stage::Runs && capture.out.len() < CHUNK_LEN;
            if goes_on { Poll::Pending } else { Poll::Ready(()) }
        });
        // A worker that hangs is not this module's concern.
        let _ = tokio::time::timeout(BEGIN_TIMEOUT, all).await;
        Ok(capture)
    }

    /// Handles new ports, and the end.
    fn hear(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(said) = self.ports.poll_recv(cx) {
            match said {
                Some(Port { name, mac }) => {
                    self.out.extend(pcapng::interface(&name, mac, self.snap));
                    self.counts.push(0);
                }
                None => {
                    if self.stage == Stage::Runs {
                        self.stage = Stage::Ends(LAST_BATCHES_MAX);
                    }
                    return;
                }
            }
        }
    }

    /// Collects batches until there is enough to pass on.
    fn gather(&mut self, cx: &mut Context<'_>) {
        self.hear(cx);
        while self.out.len() < CHUNK_LEN && self.stage != Stage::Over {
            match self.next(cx) {
                Poll::Ready(Some(len)) => self.take(cx, len),
                Poll::Ready(None) => self.close(),
                Poll::Pending => return,
            }
        }
    }

    /// Returns the length of the next batch, or `None` at the end of all.
    fn next(&mut self, cx: &mut Context<'_>) -> Poll<Option<usize>> {
        if let Stage::Ends(left) = &mut self.stage {
            let Some(less) = left.checked_sub(1) else { return Poll::Ready(None) };
            *left = less;
            // Read directly: the runtime may not know yet that the socket is readable, or may let another task run
            // first.
            let received = rustix::net::recv(&self.batches, &mut self.room[..], RecvFlags::DONTWAIT);
            return Poll::Ready(received.ok().map(|(len, _)| len).filter(|len| *len > 0));
        }
        loop {
            if ready!(self.batches.poll_recv_ready(cx)).is_err() {
                return Poll::Ready(None);
            }
            // A message longer than any batch is cut off, and so is not a batch.
            match self.batches.try_recv(&mut self.room) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(0) | Err(_) => return Poll::Ready(None),
                Ok(len) => return Poll::Ready(Some(len)),
            }
        }
    }

    fn take(&mut self, cx: &mut Context<'_>, len: usize) {
        if len == 4 {
            self.begun += 1;
            return;
        }
        // The loop names a port before any worker hears of it, but maybe after the last look.
        self.hear(cx);
        let batch = &self.room[..len];
        let before: u64 = self.counts.iter().sum();
        match pcapng::accept(batch, self.most, self.snap, &mut self.counts) {
            Some(taken) => self.out.extend_from_slice(&batch[..taken]),
            None => self.odd += 1,
        }
        self.most -= self.counts.iter().sum::<u64>() - before;
        if self.most == 0 {
            self.close();
        }
    }

    /// Writes the last blocks.
    fn close(&mut self) {
        let ports = (0_u32..).zip(&self.counts);
        let missed: Vec<u64> = (0..self.counts.len()).map(|port| self.missed.load(port)).collect();
        let times = [self.since, now_ns()];
        for ((port, count), missed) in ports.zip(&missed) {
            self.out.extend(pcapng::statistics(port, times, *count, *missed));
        }
        self.stage = Stage::Over;
        (self.gone.frames, self.gone.missed) =
            (self.counts.iter().sum(), missed.iter().fold(self.odd, |sum, missed| sum.saturating_add(*missed)));
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // The reader left before the end: the counts are known all the same.
        if self.stage != Stage::Over {
            self.close();
        }
    }
}

impl Body for Capture {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.gather(cx);
        match (self.out.is_empty(), self.stage) {
            (false, _) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.out).into())))),
            (true, Stage::Over) => Poll::Ready(None),
            (true, _) => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use rustix::net::SendFlags;
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    use super::pcapng::tests::packet;
    use super::*;
    use crate::channel;
    use crate::supervisor::door::Queued;

    /// The ends of a capture that the daemon's loop and workers have.
    struct Others {
        requests: std::sync::mpsc::Receiver<Queued>,
        worker: OwnedFd,
        missed: Arc<Words>,
        ports: UnboundedSender<Port>,
    }

    impl Others {
        fn begin() -> (Self, Begun) {
            let (sender, requests) = std::sync::mpsc::channel();
            let door = Door::new(sender).unwrap();
            let (batches, worker) = channel::pair().unwrap();
            let missed = Arc::new(Words::create("missed", 4096).unwrap());
            let (said, ports) = unbounded_channel();
            let begun = Begun {
                number: 7,
                batches,
                missed: missed.clone(),
                ports,
                told: 1,
                snap: 96,
                gone: Gone::new(door, 7),
            };
            let others = Others { requests, worker, missed, ports: said };
            others.ports.send(Port { name: "eth0".to_owned(), mac: None }).unwrap();
            others.says(&0_u32.to_le_bytes());
            (others, begun)
        }

        fn says(&self, batch: &[u8]) {
            rustix::net::send(&self.worker, batch, SendFlags::NOSIGNAL).unwrap();
        }

        /// Returns how many frames there were, and how many were missed.
        fn heard(&self) -> (u64, u64) {
            match self.requests.try_recv() {
                Ok((Request::CaptureOver { number: 7, frames, missed }, None)) => (frames, missed),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Returns the types of all blocks, to the end.
    fn blocks(begun: Begun, most: Option<u64>) -> Vec<u32> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let bytes = runtime.block_on(async {
            let capture = Capture::begin(begun, most).await.unwrap();
            capture.collect().await.unwrap().to_bytes()
        });
        let (mut blocks, mut at) = (Vec::new(), 0);
        while let Some((kind, len)) = pcapng::whole_block(&bytes[at..]).unwrap() {
            blocks.push(kind);
            at += len;
        }
        assert_eq!(at, bytes.len(), "it ends with a whole block");
        blocks
    }

    const SECTION: u32 = 0x0a0d_0d0a;
    const PORT: u32 = 1;

    #[test]
    fn what_a_worker_must_not_say_is_dropped_and_counted() {
        let (others, begun) = Others::begin();
        let sound = packet(0, &[1; 60], 60, 1);
        others.says(&sound);
        others.says(b"nonsense");
        others.says(&packet(1, &[1; 60], 60, 1));
        others.says(&[&sound[..], b"and more"].concat());
        others.says(&vec![6; BATCH_MAX + 1]);
        others.says(&sound);
        others.missed.store(0, 3);
        let Others { requests, worker, missed, ports } = others;
        drop(ports);
        assert_eq!(
            blocks(begun, None),
            [SECTION, PORT, pcapng::PACKET, pcapng::PACKET, pcapng::STATISTICS],
            "batches under way at the end are there"
        );
        let (ports, _) = unbounded_channel();
        assert_eq!(Others { requests, worker, missed, ports }.heard(), (2, 3 + 4));
    }

    #[test]
    fn it_ends_with_the_count_and_when_nobody_can_write_any_more() {
        let (others, begun) = Others::begin();
        let three = [packet(0, &[1; 60], 60, 1), packet(0, &[2; 60], 60, 2), packet(0, &[3; 60], 60, 2)].concat();
        others.says(&three);
        assert_eq!(blocks(begun, Some(2)), [SECTION, PORT, pcapng::PACKET, pcapng::PACKET, pcapng::STATISTICS]);
        assert_eq!(others.heard(), (2, 0));
        let (others, begun) = Others::begin();
        others.says(&three);
        drop(others.worker);
        assert_eq!(blocks(begun, None).len(), 6);
    }

    #[test]
    fn who_goes_on_writing_keeps_it_from_ending_no_longer_than_others() {
        let (others, begun) = Others::begin();
        let Others { worker, ports, requests, missed } = others;
        let writing = std::thread::spawn(move || {
            let batch = packet(0, &[1; 60], 60, 1);
            while rustix::net::send(&worker, &batch, SendFlags::NOSIGNAL).is_ok() {}
        });
        drop(ports);
        let seen = blocks(begun, None).len();
        assert!(seen <= LAST_BATCHES_MAX + 3, "{seen}");
        writing.join().unwrap();
        drop((requests, missed));
    }

    #[test]
    fn who_hangs_up_is_told_of() {
        let (others, begun) = Others::begin();
        drop(begun);
        assert_eq!(others.heard(), (0, 0));
    }
}
