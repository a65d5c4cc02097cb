//! The command line's end.

use std::io::ErrorKind;
use std::path::Path;

use anyhow::{Context, Result, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;

use super::types::Refused;
use crate::place;

/// Asks the daemon of this runtime directory; its answer.
pub fn ask(folder: &Path, method: Method, address: &str, body: Option<&Value>) -> Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().context("the kernel has no room")?;
    let (status, bytes) = runtime.block_on(exchange(folder, method, address, body))?;
    if status.is_success() {
        return serde_json::from_slice(&bytes).context("tasukid answers with what is no JSON; rebuild the older of the two");
    }
    match serde_json::from_slice::<Refused>(&bytes) {
        Ok(refused) => bail!("{}", refused.error),
        Err(_) => bail!("tasukid answers {status}, and does not say why; rebuild the older of the two"),
    }
}

async fn exchange(folder: &Path, method: Method, address: &str, body: Option<&Value>) -> Result<(StatusCode, Bytes)> {
    let path = place::api_socket(folder);
    let named = folder.display();
    let stream = match tokio::net::UnixStream::connect(&path).await {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {
            bail!("no tasukid is at work in {named}; start one (tasukid --config FILE --dir {named}), or name its directory with --dir")
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            bail!("you may not talk to the tasukid in {named}; only the user that started it may")
        }
        Err(error) => bail!("the tasukid in {named} cannot be reached: {error}"),
    };
    let hung_up = || format!("the tasukid in {named} hung up before it had answered; its log says why");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.with_context(hung_up)?;
    let text = body.map(ToString::to_string).unwrap_or_default();
    let request = Request::builder()
        .method(method)
        .uri(address)
        .header("host", "tasukid")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(text)))
        .context("that is no request")?;
    let talk = async {
        let answer = sender.send_request(request).await?;
        let status = answer.status();
        Ok::<_, hyper::Error>((status, answer.into_body().collect().await?.to_bytes()))
    };
    tokio::pin!(talk);
    tokio::select! {
        answered = &mut talk => return answered.with_context(hung_up),
        _ = connection => {}
    }
    talk.await.with_context(hung_up)
}
