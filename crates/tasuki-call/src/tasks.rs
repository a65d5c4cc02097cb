//! The `async fn` interface of a client, on tokio.
//!
//! # Invariants
//!
//! - **T1** A `BellReceiver` owns its descriptor, and returns that one and no other for as long as it lives.
#![allow(unsafe_code, reason = "tokio has us promise that a registered descriptor stays the same one")]

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;

use super::client::{Armed, Client, ClientOptions, ConnectError, Ticket};
use super::{Ask, Failure, Reply};

/// A client whose calls are futures. Tasks can share it: any number of them call at the same time, up to the ring's
/// size.
///
/// One task of the runtime sleeps in the bell's descriptor and wakes the callers whose results have come. Dropping a
/// future gives up its call.
#[derive(Debug, Clone)]
pub struct AsyncClient {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    client: Arc<Mutex<Client>>,
    listener: Mutex<JoinHandle<()>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        lock(&self.listener).abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl AsyncClient {
    /// Connects to the server at `path`. Blocks during the handshake.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO enabled.
    pub fn connect(path: impl AsRef<Path>, options: &ClientOptions) -> Result<Self, ConnectError> {
        // Never spin, because that would hold up the runtime's thread: results wake tasks.
        let options = ClientOptions { spin: Some(Duration::ZERO), ..options.clone() };
        let client = Arc::new(Mutex::new(Client::connect(path, &options)?));
        let listener = tokio::spawn(listen(Arc::clone(&client))).into();
        Ok(AsyncClient { shared: Arc::new(Shared { client, listener }) })
    }

    /// Runs `what` on the client itself, for synchronous operations: taking slots, looking at its state.
    pub fn with<T>(&self, what: impl FnOnce(&mut Client) -> T) -> T {
        let mut client = lock(&self.shared.client);
        let result = what(&mut client);
        ask_to_be_woken(&mut client);
        result
    }

    /// Connects again after [`CallError::ServerGone`](super::CallError::ServerGone). Blocks during the handshake.
    pub fn reconnect(&self) -> Result<(), ConnectError> {
        self.with(Client::reconnect)?;
        let listener = tokio::spawn(listen(Arc::clone(&self.shared.client)));
        std::mem::replace(&mut *lock(&self.shared.listener), listener).abort();
        Ok(())
    }

    /// Makes a call.
    pub async fn call(&self, ask: Ask<'_>) -> Result<Reply, Failure> {
        let ticket = {
            let mut client = lock(&self.shared.client);
            client.submit(ask).inspect_err(|_| ask_to_be_woken(&mut client))?
        };
        let mut call = InFlight { client: Arc::clone(&self.shared.client), ticket: Some(ticket) };
        poll_fn(|context| call.poll(context)).await
    }
}

/// Has the server ring for the results that tasks sleep for. A caller's work with the client since may have told the server that
/// this process is awake.
fn ask_to_be_woken(client: &mut Client) {
    // While there is no server, `arm` would wait for the next one. Its tasks look for that themselves.
    if client.in_flight() > 0 && client.generation().is_some() {
        // Wakes the callers whose results are here.
        while let Ok(Armed::Busy) = client.arm() {}
    }
}

/// A call whose future may be dropped.
struct InFlight {
    client: Arc<Mutex<Client>>,
    ticket: Option<Ticket>,
}

impl InFlight {
    fn poll(&mut self, context: &Context<'_>) -> Poll<Result<Reply, Failure>> {
        let Some(ticket) = &self.ticket else { unreachable!("a future is not polled after it was ready") };
        let mut client = lock(&self.client);
        let outcome = client.poll(ticket).transpose();
        match outcome {
            Some(outcome) => {
                self.ticket = None;
                ask_to_be_woken(&mut client);
                Poll::Ready(outcome)
            }
            None => {
                client.wake_when_done(ticket, context.waker());
                // If a result came after the look above, the listener, which may be asleep, must see it.
                match client.arm() {
                    Ok(Armed::Idle) => Poll::Pending,
                    Ok(Armed::Busy) | Err(_) => {
                        context.waker().wake_by_ref();
                        Poll::Pending
                    }
                }
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            lock(&self.client).abandon(ticket);
        }
    }
}

/// A duplicate descriptor, so that the client may change its link while we sleep in the old one.
struct BellReceiver(OwnedFd);

impl AsRawFd for BellReceiver {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for BellReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps in the bell and gathers results, from all servers that follow each other.
async fn listen(client: Arc<Mutex<Client>>) {
    while let Ok(Some((bell_receiver, generation))) = bell_receiver(&client) {
        loop {
            let Ok(mut ready) = bell_receiver.readable().await else { return };
            let mut client = lock(&client);
            ready.clear_ready();
            client.woken();
            // Wakes the callers whose results are here. Callers that still wait arm the bell again.
            while let Ok(Armed::Busy) = client.arm() {}
            // A caller may have noticed before us that the server was replaced.
            if client.generation() != Some(generation) {
                break;
            }
        }
    }
}

/// Returns a bell to sleep in, and the generation of its server, or `None` if there is no server.
fn bell_receiver(client: &Mutex<Client>) -> io::Result<Option<(AsyncFd<BellReceiver>, u32)>> {
    let mut client = lock(client);
    if client.generation().is_none() {
        // There may be a successor whose handshake no caller has waited out.
        let _ = client.arm();
    }
    let (Some(fd), Some(generation)) = (client.fd(), client.generation()) else { return Ok(None) };
    let bell_receiver = BellReceiver(fd.as_fd().try_clone_to_owned()?);
    // SAFETY: the descriptor stays open and the same until the AsyncFd drops the `BellReceiver` (T1).
    let registered = unsafe { AsyncFd::register_with_interest(bell_receiver, Interest::READABLE) }?;
    Ok(Some((registered, generation)))
}
