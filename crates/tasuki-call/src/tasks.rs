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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::Handle;
use tokio::task::{JoinHandle, yield_now};

use super::client::{Armed, Client, ClientOptions, ConnectError, POLL_LIVENESS, Ticket, kernel};
use super::{Ask, CallError, Failure, Reply};

/// A client whose calls are futures. Tasks can share it: any number of them call at the same time, up to the ring's
/// size.
///
/// One task of the runtime sleeps in the bell's descriptor and wakes the callers whose results have come. If that
/// runtime ends, a task of a caller's runtime takes its place. Dropping a future gives up its call.
#[derive(Debug, Clone)]
pub struct AsyncClient {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    client: Arc<Mutex<Client>>,
    listener: Mutex<Listener>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        lock(&self.listener).task.abort();
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
        let runtime = Handle::current();
        // Never spin, because that would hold up the runtime's thread: results wake tasks.
        let options = ClientOptions { spin: Some(Duration::ZERO), ..options.clone() };
        let path = path.as_ref();
        let client = Arc::new(Mutex::new(Client::connect(path, &options)?));
        let listener = Listener::start(runtime, &client).map_err(|source| kernel("watching the bell", source))?;
        let listener = listener.ok_or_else(|| ConnectError::NoServer { path: path.to_owned() })?.into();
        Ok(AsyncClient { shared: Arc::new(Shared { client, listener }) })
    }

    /// Runs `what` on the client itself, for synchronous operations: taking slots, looking at its state.
    pub fn with<T>(&self, what: impl FnOnce(&mut Client) -> T) -> T {
        let mut client = lock(&self.shared.client);
        let result = what(&mut client);
        ask_to_be_woken(&mut client);
        result
    }

    /// Connects again after [`CallError::ServerGone`]. Blocks during the handshake.
    ///
    /// # Panics
    /// Outside a tokio runtime with IO enabled.
    pub fn reconnect(&self) -> Result<(), ConnectError> {
        let runtime = Handle::current();
        self.with(Client::reconnect)?;
        let mut listener = lock(&self.shared.listener);
        let started = Listener::start(runtime, &self.shared.client);
        if let Some(started) = started.map_err(|source| kernel("watching the bell", source))? {
            std::mem::replace(&mut *listener, started).task.abort();
        }
        Ok(())
    }

    /// Makes a call.
    ///
    /// # Errors
    /// Also [`CallError::Kernel`] if the process has no descriptor left to hear of the result. The call may have run.
    ///
    /// # Panics
    /// If no task listens for results any more, and the caller's runtime has no IO enabled.
    pub async fn call(&self, ask: Ask<'_>) -> Result<Reply, Failure> {
        // Without a server, `submit` would wait for its successor.
        while lock(&self.shared.client).is_seeking(POLL_LIVENESS) {
            yield_now().await;
        }
        let ticket = {
            let mut client = lock(&self.shared.client);
            client.submit(ask).inspect_err(|_| ask_to_be_woken(&mut client))?
        };
        let mut call = InFlight { shared: &self.shared, ticket: Some(ticket) };
        poll_fn(|context| call.poll(context)).await
    }
}

/// Has the server ring for the results that tasks sleep for. A caller's work with the client since may have told the server that
/// this process is awake.
fn ask_to_be_woken(client: &mut Client) {
    // While there is no server, `arm` would wait for the next one. The listener looks for that itself.
    if client.in_flight() > 0 && client.generation().is_some() {
        // Wakes the callers whose results are here.
        while let Ok(Armed::Busy) = client.arm() {}
    }
}

impl Shared {
    /// Makes sure that a task listens for results. Returns false if there is no server to listen to.
    fn listen(&self) -> io::Result<bool> {
        let mut listener = lock(&self.listener);
        if listener.listens.load(Ordering::SeqCst) {
            return Ok(true);
        }
        let started = match Listener::start(listener.runtime.clone(), &self.client) {
            Ok(Some(started)) if started.listens.load(Ordering::SeqCst) => Ok(Some(started)),
            // Perhaps that runtime has ended, or is about to: then it drops the task at once.
            other => match Handle::try_current() {
                Ok(here) => Listener::start(here, &self.client),
                Err(_) => other,
            },
        }?;
        Ok(started.map(|started| *listener = started).is_some())
    }
}

/// A call whose future may be dropped.
struct InFlight<'a> {
    shared: &'a Shared,
    ticket: Option<Ticket>,
}

impl InFlight<'_> {
    fn poll(&mut self, context: &Context<'_>) -> Poll<Result<Reply, Failure>> {
        let Some(ticket) = &self.ticket else { unreachable!("a future is not polled after it was ready") };
        let mut client = lock(&self.shared.client);
        if let Some(outcome) = client.poll(ticket).transpose() {
            self.ticket = None;
            ask_to_be_woken(&mut client);
            return Poll::Ready(outcome);
        }
        client.wake_when_done(ticket, context.waker());
        // If a result came after the look above, the listener, which may be asleep, must see it. While there is no
        // server, the listener looks for the next one.
        let idle = client.generation().is_none() || matches!(client.arm(), Ok(Armed::Idle));
        drop(client);
        // A listener that ends after this wakes us: it looks for wakers when it has said so.
        match idle.then(|| self.shared.listen()) {
            Some(Ok(true)) => {}
            Some(Ok(false)) | None => context.waker().wake_by_ref(),
            Some(Err(error)) => return Poll::Ready(Err(CallError::Kernel(Arc::new(error)).into())),
        }
        Poll::Pending
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            lock(&self.shared.client).abandon(ticket);
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

/// The task that listens for the results of one server.
#[derive(Debug)]
struct Listener {
    runtime: Handle,
    task: JoinHandle<()>,
    listens: Arc<AtomicBool>,
}

impl Listener {
    /// Starts the task on `runtime`. Returns `None` if there is no server.
    fn start(runtime: Handle, client: &Arc<Mutex<Client>>) -> io::Result<Option<Self>> {
        let inside = runtime.enter();
        let locked = lock(client);
        let (Some(fd), Some(generation)) = (locked.fd(), locked.generation()) else { return Ok(None) };
        let bell_receiver = BellReceiver(fd.as_fd().try_clone_to_owned()?);
        drop(locked);
        // SAFETY: the descriptor stays open and the same until the AsyncFd drops the `BellReceiver` (T1).
        let bell_receiver = unsafe { AsyncFd::register_with_interest(bell_receiver, Interest::READABLE) }?;
        let listens = Arc::new(AtomicBool::new(true));
        let listening = Listening { client: Arc::clone(client), listens: Arc::clone(&listens) };
        // A runtime that is about to end drops the task at once, which takes the client's lock.
        let task = runtime.spawn(listening.to(bell_receiver, generation));
        drop(inside);
        Ok(Some(Listener { runtime, task, listens }))
    }
}

/// Held by the task that listens. However that ends, callers learn that nobody will wake them, and start another one.
struct Listening {
    client: Arc<Mutex<Client>>,
    listens: Arc<AtomicBool>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.listens.store(false, Ordering::SeqCst);
        lock(&self.client).wake_all();
    }
}

impl Listening {
    /// Sleeps in the bell and gathers results until there is another server, or none.
    async fn to(self, bell_receiver: AsyncFd<BellReceiver>, generation: u32) {
        while let Ok(mut ready) = bell_receiver.readable().await {
            let mut client = lock(&self.client);
            let closed = ready.ready().is_read_closed();
            ready.clear_ready();
            client.woken_within(POLL_LIVENESS);
            // Wakes the callers whose results are here. Callers that still wait arm the bell again.
            ask_to_be_woken(&mut client);
            // A caller may have noticed before us that the server was replaced.
            if closed || client.generation() != Some(generation) {
                break;
            }
        }
        while lock(&self.client).is_seeking(POLL_LIVENESS) {
            yield_now().await;
        }
    }
}
