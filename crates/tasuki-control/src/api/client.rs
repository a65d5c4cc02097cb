//! The command line's end of the API.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;

use super::types::Refused;
use crate::{place, registry};

/// Times within which the daemon shows something, and does something. The second is longer than any limit of a relay.
const GET_TIMEOUT: Duration = Duration::from_secs(20);
const CHANGE_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause between two looks whether a daemon that does something still answers.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Time for a tasukid that lives and does not serve: it begins, or goes on as another program.
const COMING_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause between two looks whether it serves.
const COMING_EVERY: Duration = Duration::from_millis(20);

/// tasukid refuses a request, with this status of HTTP.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct Refusal {
    pub status: StatusCode,
    pub sentence: String,
}

/// Whether `error` is a [`Refusal`] with this status.
pub fn has_status(error: &anyhow::Error, status: StatusCode) -> bool {
    error.downcast_ref::<Refusal>().is_some_and(|refusal| refusal.status == status)
}

/// No tasukid is at work in this runtime directory.
#[derive(Debug, thiserror::Error)]
#[error(
    "no tasukid is at work in {folder}{left}; start one (tasukid --config FILE --dir {folder}), or name its directory with --dir"
)]
pub struct NotThere {
    folder: String,
    /// What an earlier one has left there.
    left: &'static str,
}

/// A tasukid has heard a request, perhaps, and died or gone on as another program before its answer.
#[derive(Debug, thiserror::Error)]
#[error("the tasukid in {folder} hung up before it had answered; its log says why")]
pub struct HungUp {
    folder: String,
}

impl HungUp {
    fn of(folder: &Path) -> Self {
        HungUp { folder: folder.display().to_string() }
    }
}

/// Sends a request to the daemon of this runtime directory, and returns its answer. A refusal is a [`Refusal`], a daemon
/// that cannot be asked [`NotThere`], and one that ends meanwhile [`HungUp`].
pub fn ask(folder: &Path, method: Method, address: &str, body: Option<&Value>) -> Result<Value> {
    let limit = if method == Method::GET { GET_TIMEOUT } else { CHANGE_TIMEOUT };
    ask_within(limit, folder, method, address, body)
}

/// Like [`ask`], with another limit on the time.
pub fn ask_within(
    limit: Duration,
    folder: &Path,
    method: Method,
    address: &str,
    body: Option<&Value>,
) -> Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.context("the kernel has no room")?;
    let answered = runtime.block_on(exchange_within(limit, folder, method, address, body));
    serde_json::from_slice(&answered?).context("tasukid's answer is not JSON; rebuild the older of the two")
}

async fn exchange_within(
    limit: Duration,
    folder: &Path,
    method: Method,
    address: &str,
    body: Option<&Value>,
) -> Result<Bytes> {
    let silent = |limit: Duration| {
        let (named, seconds) = (folder.display(), limit.as_secs());
        anyhow::anyhow!(
            "the tasukid in {named} has not answered for {seconds} s; end it (kill -9), and start another: workers go on meanwhile"
        )
    };
    tokio::select! {
        answered = exchange_whole(folder, method, address, body) => answered,
        () = tokio::time::sleep(limit) => Err(silent(limit)),
        () = stands_still(folder), if limit > GET_TIMEOUT => Err(silent(GET_TIMEOUT)),
    }
}

async fn exchange_whole(folder: &Path, method: Method, address: &str, body: Option<&Value>) -> Result<Bytes> {
    let answer = open(folder, method, address, body).await?;
    whole(folder, answer).await
}

/// Returns when the daemon has not answered a short question in time. A refusal is an answer.
async fn stands_still(folder: &Path) {
    let asks = || exchange_whole(folder, Method::GET, "/v1/status", None);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        if tokio::time::timeout(GET_TIMEOUT, asks()).await.is_err() {
            return;
        }
    }
}

/// Returns the whole body of an answer.
async fn whole(folder: &Path, answer: Response<Incoming>) -> Result<Bytes> {
    Ok(answer.into_body().collect().await.with_context(|| HungUp::of(folder))?.to_bytes())
}

/// The header that gives the number of a capture.
pub const CAPTURE: &str = "tasuki-capture";

/// Sends a request to the daemon of this runtime directory, and returns its answer, whose body may still be arriving. A
/// refusal is an error.
pub async fn open(folder: &Path, method: Method, address: &str, body: Option<&Value>) -> Result<Response<Incoming>> {
    let answer = exchange(folder, method, address, body).await?;
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    match serde_json::from_slice::<Refused>(&whole(folder, answer).await?) {
        Ok(refused) => Err(Refusal { status, sentence: refused.error }.into()),
        Err(_) => bail!("tasukid answers {status}, and does not say why; rebuild the older of the two"),
    }
}

async fn exchange(folder: &Path, method: Method, address: &str, body: Option<&Value>) -> Result<Response<Incoming>> {
    let path = place::api_socket(folder);
    let named = folder.display();
    let is_absent = |error: &std::io::Error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
    let until = tokio::time::Instant::now() + COMING_TIMEOUT;
    let connected = loop {
        match tokio::net::UnixStream::connect(&path).await {
            Err(error) if is_absent(&error) && place::is_held(folder) && tokio::time::Instant::now() < until => {
                tokio::time::sleep(COMING_EVERY).await;
            }
            connected => break connected,
        }
    };
    let stream = match connected {
        Ok(stream) => stream,
        Err(error) if is_absent(&error) => {
            let has_left = folder.join(registry::FILE).exists();
            let left = if has_left { ", and workers of an earlier one may drive on" } else { "" };
            return Err(NotThere { folder: named.to_string(), left }.into());
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!(
                "you may not talk to the tasukid in {named}; only the user that started it may, and users with a role under [api] in its configuration"
            )
        }
        // Its queue of requests is full.
        Err(error) if error.kind() == ErrorKind::WouldBlock => bail!(
            "the tasukid in {named} has more requests than it answers; if it stays so, end it (kill -9), and start another: workers go on meanwhile"
        ),
        Err(error) if error.kind() == ErrorKind::InvalidInput => {
            bail!("{named} is too long for a socket, so no tasukid is at work there; name another directory with --dir")
        }
        Err(error) => bail!("the tasukid in {named} cannot be reached: {error}"),
    };
    let hung_up = || HungUp::of(folder);
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.with_context(hung_up)?;
    let text = body.map(ToString::to_string).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(address)
        .header("host", "tasukid")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(text)))
        .context("that is not a request")?;
    // Ends with the answer, or with its reader.
    tokio::spawn(connection);
    sender.send_request(request).await.with_context(hung_up)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The clock jumps to the next moment that something waits for.
    #[tokio::test(start_paused = true)]
    async fn a_long_request_ends_when_the_daemon_answers_nothing_at_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let _stands_still = std::os::unix::net::UnixListener::bind(place::api_socket(folder.path())).expect("a socket");
        let begun = tokio::time::Instant::now();
        let answered = exchange_within(CHANGE_TIMEOUT, folder.path(), Method::POST, "/v1/stop", None).await;
        let said = answered.expect_err("nothing answers").to_string();
        assert!(said.contains("has not answered for 20 s; end it (kill -9)"), "{said}");
        assert_eq!(begun.elapsed(), LOOK_EVERY + GET_TIMEOUT);
    }
}
