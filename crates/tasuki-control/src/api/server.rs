//! The server. It puts each request into the daemon's loop, and answers when the loop has.

use std::future::Future;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Extension, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use utoipa::OpenApi;

use super::capture::Capture;
use super::client::CAPTURE;
use super::gate::{self, Gate};
use super::metrics::{self, Metrics};
use super::peer::Peer;
use super::roles::{Role, Roles};
use super::types::{
    Applied, Apply, Counts, Ended, Event, Give, NicView, NodeView, Plan, Refused, Relayed, Removed, Replace, Replaced,
    Staging, Standby, Status, Stopped, TalkView, Upgrade, VniNodeView, VniView, WorkerView, Written,
};
use crate::spawn::not_startable;
use crate::supervisor::captures::Of;
use crate::supervisor::door::{Door, Refusal, Request};
use crate::{config, successor};

/// The OpenAPI description of all routes.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "tasukid",
        description = "Nodes, workers and NICs of this machine. Spoken over the unix socket api.sock in the runtime directory."
    ),
    paths(
        status,
        nodes,
        add_node,
        remove_node,
        workers,
        nics,
        events,
        upgrade,
        stage,
        unstage,
        give,
        standby,
        counts,
        vnis,
        vni_table,
        vni_stats,
        capture_node,
        capture_nic,
        end_capture,
        metrics,
        snapshot,
        configuration,
        plan,
        apply,
        replace,
        stop
    )
)]
struct Description;

/// Returns the description as text.
pub fn description() -> String {
    Description::openapi().to_pretty_json().expect("a description is plain data")
}

/// How long the look at a program may take.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// An answer, as the loop gives it.
struct Answered<T>(Result<T, Refusal>);

impl<T: Serialize> IntoResponse for Answered<T> {
    fn into_response(self) -> Response {
        match self.0 {
            Ok(value) => Json(value).into_response(),
            Err(refusal) => {
                let status = match refusal {
                    Refusal::NotFound(_) => StatusCode::NOT_FOUND,
                    Refusal::Malformed(_) => StatusCode::UNPROCESSABLE_ENTITY,
                    Refusal::Conflict { .. } => StatusCode::CONFLICT,
                    Refusal::Forbidden(_) => StatusCode::FORBIDDEN,
                    Refusal::Busy(_) | Refusal::Ending => StatusCode::SERVICE_UNAVAILABLE,
                };
                (status, Json(Refused::from(refusal))).into_response()
            }
        }
    }
}

async fn ask<T>(door: &Door, request: impl FnOnce(oneshot::Sender<Result<T, Refusal>>) -> Request) -> Answered<T> {
    let (answer, answered) = oneshot::channel();
    // The connection is looked at again before this goes on: a caller that hung up right after its request is not served.
    tokio::task::yield_now().await;
    // Ends with this future, which ends with the connection.
    let caller = Arc::new(());
    door.put_for(&caller, request(answer));
    let answered = Answered(answered.await.unwrap_or(Err(Refusal::Ending)));
    drop(caller);
    answered
}

fn words<T>(body: Result<Json<T>, JsonRejection>) -> Result<T, Refusal> {
    body.map(|Json(body)| body).map_err(|rejection| Refusal::Malformed(plain(&rejection.body_text()).to_owned()))
}

/// Returns what a query says, or the mistake in it.
fn asked<T>(query: Result<Query<T>, QueryRejection>) -> Result<T, Refusal> {
    query.map(|Query(asked)| asked).map_err(|rejection| {
        let text = rejection.body_text();
        let what = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
        Refusal::Malformed(format!(
            "what follows the question mark cannot be used ({what}); /openapi.json says what this address takes"
        ))
    })
}

/// Returns the mistake in a body without JSON terms: the author of the command never saw it as JSON.
fn plain(text: &str) -> &str {
    let text = text.strip_prefix("Failed to deserialize the JSON body into the target type: ").unwrap_or(text);
    text.rsplit_once(" at line 1 column ").map_or(text, |(text, _)| text)
}

#[utoipa::path(get, path = "/v1/status", responses((status = 200, body = Status)))]
async fn status(State(door): State<Door>) -> Answered<Status> {
    ask(&door, Request::Status).await
}

#[utoipa::path(get, path = "/v1/nodes", responses((status = 200, body = [NodeView])))]
async fn nodes(State(door): State<Door>) -> Answered<Vec<NodeView>> {
    ask(&door, Request::Nodes).await
}

#[utoipa::path(get, path = "/v1/workers", responses((status = 200, body = [WorkerView])))]
async fn workers(State(door): State<Door>) -> Answered<Vec<WorkerView>> {
    ask(&door, Request::Workers).await
}

#[utoipa::path(get, path = "/v1/nics", responses((status = 200, body = [NicView])))]
async fn nics(State(door): State<Door>) -> Answered<Vec<NicView>> {
    ask(&door, Request::Nics).await
}

/// Query of `/v1/events`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Since {
    #[serde(default)]
    since: u64,
}

#[utoipa::path(get, path = "/v1/events", params(("since" = Option<u64>, Query, description = "events after this number; all, where none has it yet")),
    responses((status = 200, body = [Event])))]
async fn events(State(door): State<Door>, since: Result<Query<Since>, QueryRejection>) -> Answered<Vec<Event>> {
    match asked(since) {
        Ok(Since { since }) => ask(&door, |answer| Request::Events { since, answer }).await,
        Err(refusal) => Answered(Err(refusal)),
    }
}

#[utoipa::path(post, path = "/v1/nodes/{name}/upgrade", params(("name" = String, Path, description = "a node")), request_body = Upgrade,
    responses((status = 200, body = Relayed), (status = 403, body = Refused), (status = 404, body = Refused), (status = 409, body = Refused), (status = 422, body = Refused)))]
async fn upgrade(
    State(door): State<Door>,
    Path(node): Path<String>,
    Extension(role): Extension<Role>,
    Extension(peer): Extension<Arc<Peer>>,
    body: Result<Json<Upgrade>, JsonRejection>,
) -> Answered<Relayed> {
    match words(body) {
        Ok(Upgrade { with: Some(_), .. }) if role < Role::Administer => Answered(Err(may_not_name(&peer, role))),
        Ok(upgrade) => match look_at(upgrade.with.clone()).await {
            Ok(()) => ask(&door, |answer| Request::Upgrade { node, upgrade, answer }).await,
            Err(refusal) => Answered(Err(refusal)),
        },
        Err(refusal) => Answered(Err(refusal)),
    }
}

/// Looks at a program that a caller names as the loop does after that, which would wait for a file system that does not answer.
async fn look_at(with: Option<PathBuf>) -> Result<(), Refusal> {
    let Some(with) = with else { return Ok(()) };
    let named = with.display().to_string();
    // Its mistakes the loop finds, too.
    let look = tokio::task::spawn_blocking(move || not_startable(&with));
    tokio::time::timeout(LOOK_TIMEOUT, look).await.map(drop).map_err(|_| {
        Refusal::Malformed(format!(
            "{named} cannot be looked at within {} s, for its file system does not answer; mend that, or name a program that lies elsewhere",
            LOOK_TIMEOUT.as_secs()
        ))
    })
}

/// Refuses a program named by a user below `administer`: that user would run it.
fn may_not_name(peer: &Peer, role: Role) -> Refusal {
    Refusal::Forbidden(gate::may_not(peer, Some(role), Role::Administer))
}

#[utoipa::path(post, path = "/v1/nodes/{name}/stage", params(("name" = String, Path, description = "a node")), request_body = Staging,
    responses((status = 200, body = Relayed), (status = 403, body = Refused), (status = 404, body = Refused), (status = 409, body = Refused), (status = 422, body = Refused)))]
async fn stage(
    State(door): State<Door>,
    Path(node): Path<String>,
    Extension(role): Extension<Role>,
    Extension(peer): Extension<Arc<Peer>>,
    body: Result<Json<Staging>, JsonRejection>,
) -> Answered<Relayed> {
    match words(body) {
        Ok(Staging { with: Some(_) }) if role < Role::Administer => Answered(Err(may_not_name(&peer, role))),
        Ok(staging) => match look_at(staging.with.clone()).await {
            Ok(()) => ask(&door, |answer| Request::Stage { node, staging, answer }).await,
            Err(refusal) => Answered(Err(refusal)),
        },
        Err(refusal) => Answered(Err(refusal)),
    }
}

#[utoipa::path(delete, path = "/v1/nodes/{name}/stage", params(("name" = String, Path, description = "a node")),
    responses((status = 200, body = Relayed), (status = 404, body = Refused), (status = 409, body = Refused)))]
async fn unstage(State(door): State<Door>, Path(node): Path<String>) -> Answered<Relayed> {
    ask(&door, |answer| Request::Unstage { node, answer }).await
}

#[utoipa::path(post, path = "/v1/nics/{name}/give", params(("name" = String, Path, description = "a NIC")), request_body = Give,
    responses((status = 200, body = Relayed), (status = 404, body = Refused), (status = 409, body = Refused), (status = 422, body = Refused)))]
async fn give(
    State(door): State<Door>,
    Path(nic): Path<String>,
    body: Result<Json<Give>, JsonRejection>,
) -> Answered<Relayed> {
    match words(body) {
        Ok(give) => ask(&door, |answer| Request::Give { nic, give, answer }).await,
        Err(refusal) => Answered(Err(refusal)),
    }
}

#[utoipa::path(post, path = "/v1/nics/{name}/standby", params(("name" = String, Path, description = "a NIC")), request_body = Standby,
    responses((status = 200, body = NicView), (status = 404, body = Refused), (status = 409, body = Refused), (status = 422, body = Refused), (status = 503, body = Refused)))]
async fn standby(
    State(door): State<Door>,
    Path(nic): Path<String>,
    body: Result<Json<Standby>, JsonRejection>,
) -> Answered<NicView> {
    match words(body) {
        Ok(standby) => ask(&door, |answer| Request::Standby { nic, standby, answer }).await,
        Err(refusal) => Answered(Err(refusal)),
    }
}

#[utoipa::path(get, path = "/v1/nics/{name}/counts", params(("name" = String, Path, description = "a NIC")),
    responses((status = 200, body = Counts), (status = 404, body = Refused), (status = 409, body = Refused)))]
async fn counts(State(door): State<Door>, Path(nic): Path<String>) -> Answered<Counts> {
    ask(&door, |answer| Request::Counts { nic, answer }).await
}

#[utoipa::path(post, path = "/v1/nodes", request_body = config::Node,
    responses((status = 200, body = NodeView), (status = 409, body = Refused), (status = 422, body = Refused), (status = 503, body = Refused)))]
async fn add_node(State(door): State<Door>, body: Result<Json<config::Node>, JsonRejection>) -> Answered<NodeView> {
    match words(body) {
        Ok(node) => ask(&door, |answer| Request::AddNode { node: Box::new(node), answer }).await,
        Err(refusal) => Answered(Err(refusal)),
    }
}

#[utoipa::path(delete, path = "/v1/nodes/{name}", params(("name" = String, Path, description = "a node")),
    responses((status = 200, body = Removed), (status = 404, body = Refused), (status = 409, body = Refused), (status = 503, body = Refused)))]
async fn remove_node(State(door): State<Door>, Path(node): Path<String>) -> Answered<Removed> {
    ask(&door, |answer| Request::RemoveNode { node, answer }).await
}

#[utoipa::path(get, path = "/v1/vnis", responses((status = 200, body = [VniView])))]
async fn vnis(State(door): State<Door>) -> Answered<Vec<VniView>> {
    ask(&door, Request::Vnis).await
}

#[utoipa::path(get, path = "/v1/vnis/{name}/table", params(("name" = String, Path, description = "a VNI")),
    responses((status = 200, body = [VniNodeView]), (status = 404, body = Refused)))]
async fn vni_table(State(door): State<Door>, Path(vni): Path<String>) -> Answered<Vec<VniNodeView>> {
    ask(&door, |answer| Request::VniTable { vni, answer }).await
}

#[utoipa::path(get, path = "/v1/vnis/{name}/stats", params(("name" = String, Path, description = "a VNI")),
    responses((status = 200, body = [TalkView]), (status = 404, body = Refused), (status = 409, body = Refused)))]
async fn vni_stats(State(door): State<Door>, Path(vni): Path<String>) -> Answered<Vec<TalkView>> {
    ask(&door, |answer| Request::VniStats { vni, answer }).await
}

/// Query of a capture: how much to capture.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Much {
    /// Bytes of each frame; by default more than a frame has, so all of it.
    #[serde(default = "all")]
    snap: u32,
    count: Option<u64>,
}

/// The value by which other programs say that all of a frame is kept.
fn all() -> u32 {
    262_144
}

/// Answers with the capture, as it comes.
async fn capture(door: &Door, of: Of, much: Result<Query<Much>, QueryRejection>) -> Response {
    let Much { snap, count } = match asked(much) {
        Ok(much) => much,
        Err(refusal) => return Answered::<()>(Err(refusal)).into_response(),
    };
    if snap < 14 || count == Some(0) {
        let sentence = "snap is at least 14, the bytes of a frame's head, and count at least 1".to_owned();
        return Answered::<()>(Err(Refusal::Malformed(sentence))).into_response();
    }
    let begun = match ask(door, |answer| Request::Capture { of, snap, answer }).await.0 {
        Ok(begun) => begun,
        Err(refusal) => return Answered::<()>(Err(refusal)).into_response(),
    };
    let number = begun.number.to_string();
    match Capture::begin(begun, count).await {
        Ok(capture) => {
            let heads = [("content-type", "application/x-pcapng"), (CAPTURE, &number)];
            (heads, axum::body::Body::new(capture)).into_response()
        }
        Err(error) => {
            Answered::<()>(Err(Refusal::conflict(format!("there is no room for a capture: {error}")))).into_response()
        }
    }
}

#[utoipa::path(get, path = "/v1/nodes/{name}/capture",
    params(("name" = String, Path, description = "a node, all of whose ports are captured"),
        ("snap" = Option<u32>, Query, description = "bytes that are kept of each frame"),
        ("count" = Option<u64>, Query, description = "frames after which it ends; by default, when the caller hangs up")),
    responses((status = 200, description = "pcapng that goes on; the head tasuki-capture has its number", content_type = "application/x-pcapng"),
        (status = 404, body = Refused), (status = 409, body = Refused), (status = 422, body = Refused)))]
async fn capture_node(
    State(door): State<Door>,
    Path(node): Path<String>,
    much: Result<Query<Much>, QueryRejection>,
) -> Response {
    capture(&door, Of::Node(node), much).await
}

#[utoipa::path(get, path = "/v1/nics/{name}/capture",
    params(("name" = String, Path, description = "a NIC, or a node's end of a VNI"),
        ("snap" = Option<u32>, Query, description = "bytes that are kept of each frame"),
        ("count" = Option<u64>, Query, description = "frames after which it ends; by default, when the caller hangs up")),
    responses((status = 200, description = "pcapng that goes on; the head tasuki-capture has its number", content_type = "application/x-pcapng"),
        (status = 404, body = Refused), (status = 409, body = Refused), (status = 422, body = Refused)))]
async fn capture_nic(
    State(door): State<Door>,
    Path(nic): Path<String>,
    much: Result<Query<Much>, QueryRejection>,
) -> Response {
    capture(&door, Of::Nic(nic), much).await
}

#[utoipa::path(delete, path = "/v1/captures/{number}", params(("number" = u32, Path, description = "a capture")),
    responses((status = 200, body = Ended), (status = 404, body = Refused)))]
async fn end_capture(State(door): State<Door>, Path(number): Path<String>) -> Answered<Ended> {
    match number.parse() {
        Ok(number) => ask(&door, |answer| Request::EndCapture { number, answer }).await,
        Err(_) => Answered(Err(Refusal::NotFound(format!("there is no capture {number}")))),
    }
}

#[utoipa::path(get, path = "/v1/metrics",
    responses((status = 200, description = "the counts for Prometheus", content_type = "text/plain")))]
async fn metrics(State(door): State<Door>, Extension(shared): Extension<Arc<metrics::Shared>>) -> Response {
    metrics::answer(&door, &shared, Duration::ZERO).await
}

#[utoipa::path(get, path = "/v1/snapshot", responses((status = 200, body = Metrics)))]
async fn snapshot(State(door): State<Door>) -> Answered<Metrics> {
    ask(&door, Request::Metrics).await
}

#[utoipa::path(get, path = "/v1/configuration", responses((status = 200, body = Written), (status = 409, body = Refused)))]
async fn configuration(State(door): State<Door>) -> Answered<Written> {
    ask(&door, Request::Configuration).await
}

#[utoipa::path(post, path = "/v1/plan", request_body = Apply,
    responses((status = 200, body = Plan), (status = 422, body = Refused)))]
async fn plan(State(door): State<Door>, body: Result<Json<Apply>, JsonRejection>) -> Answered<Plan> {
    match words(body) {
        Ok(apply) => ask(&door, |answer| Request::Plan { apply, answer }).await,
        Err(refusal) => Answered(Err(refusal)),
    }
}

#[utoipa::path(post, path = "/v1/apply", request_body = Apply,
    responses((status = 200, body = Applied), (status = 409, body = Refused), (status = 422, body = Refused),
    (status = 503, body = Refused)))]
async fn apply(State(door): State<Door>, body: Result<Json<Apply>, JsonRejection>) -> Answered<Applied> {
    match words(body) {
        Ok(apply) => ask(&door, |answer| Request::Apply { apply, answer }).await,
        Err(refusal) => Answered(Err(refusal)),
    }
}

#[utoipa::path(post, path = "/v1/upgrade", request_body = Replace,
    responses((status = 200, body = Replaced), (status = 409, body = Refused), (status = 422, body = Refused), (status = 503, body = Refused)))]
async fn replace(
    State(door): State<Door>,
    Extension(Cpus(cpus)): Extension<Cpus>,
    body: Result<Json<Replace>, JsonRejection>,
) -> Answered<Replaced> {
    let checked = match words(body) {
        // It starts the program, and waits for it.
        Ok(Replace { with }) => tokio::task::spawn_blocking(move || successor::check(with, &cpus)).await,
        Err(refusal) => return Answered(Err(refusal)),
    };
    match checked {
        Ok(Ok((with, version, says))) => ask(&door, |answer| Request::Replace { with, version, says, answer }).await,
        Ok(Err(sentence)) => Answered(Err(Refusal::Malformed(sentence))),
        Err(_) => Answered(Err(Refusal::conflict("tasukid has no thread left to look at the program; ask again"))),
    }
}

#[utoipa::path(post, path = "/v1/stop", responses((status = 200, body = Stopped)))]
async fn stop(State(door): State<Door>) -> Answered<Stopped> {
    ask(&door, Request::Stop).await
}

async fn nothing_there() -> Answered<()> {
    Answered(Err(Refusal::NotFound("there is no such address; /openapi.json lists all addresses".to_owned())))
}

async fn not_so() -> Response {
    let error = "this address does not take this method; /openapi.json lists the methods".to_owned();
    (StatusCode::METHOD_NOT_ALLOWED, Json(Refused { error, relays: Vec::new() })).into_response()
}

/// CPUs that the daemon, and the program that it goes on as, may give to nodes.
#[derive(Debug, Clone)]
struct Cpus(Arc<[u32]>);

fn router(door: Door, gate: Gate, cpus: Cpus) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/nodes", get(nodes).post(add_node))
        .route("/v1/nodes/{name}", delete(remove_node))
        .route("/v1/vnis", get(vnis))
        .route("/v1/vnis/{name}/table", get(vni_table))
        .route("/v1/vnis/{name}/stats", get(vni_stats))
        .route("/v1/workers", get(workers))
        .route("/v1/nics", get(nics))
        .route("/v1/events", get(events))
        .route("/v1/nodes/{name}/upgrade", post(upgrade))
        .route("/v1/nodes/{name}/stage", post(stage).delete(unstage))
        .route("/v1/nics/{name}/give", post(give))
        .route("/v1/nics/{name}/standby", post(standby))
        .route("/v1/nics/{name}/counts", get(counts))
        .route("/v1/nodes/{name}/capture", get(capture_node))
        .route("/v1/nics/{name}/capture", get(capture_nic))
        .route("/v1/captures/{number}", delete(end_capture))
        .route("/v1/metrics", get(metrics))
        .route("/v1/snapshot", get(snapshot))
        .route("/v1/configuration", get(configuration))
        .route("/v1/plan", post(plan))
        .route("/v1/apply", post(apply))
        .route("/v1/upgrade", post(replace))
        .route("/v1/stop", post(stop))
        .route("/openapi.json", get(async || ([("content-type", "application/json")], description())))
        .layer(Extension(cpus))
        .layer(Extension(Arc::new(metrics::Shared::default())))
        // The gate has its own.
        .layer(DefaultBodyLimit::disable())
        .fallback(nothing_there)
        .method_not_allowed_fallback(not_so)
        .layer(axum::middleware::from_fn_with_state(gate, gate::guard))
        .with_state(door)
}

/// All that serving takes descriptors for, from the start on.
#[derive(Debug)]
pub struct Begun {
    runtime: tokio::runtime::Runtime,
    listener: tokio::net::UnixListener,
    open: Option<tokio::net::TcpListener>,
}

/// Opens all that [`serve`] needs.
///
/// # Errors
/// The process may open no descriptor more.
pub fn begin(listener: UnixListener, open: Option<std::net::TcpListener>) -> std::io::Result<Begun> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    let entered = runtime.enter();
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let open = open.map(tokio::net::TcpListener::from_std).transpose()?;
    drop(entered);
    Ok(Begun { runtime, listener, open })
}

/// Serves callers with these roles, until `over`, which says for how long the last answers may take, and the counts, if they
/// have an address. Nodes may run on `cpus`. `again` gives another socket if somebody has deleted the one that there is.
pub fn serve(
    Begun { runtime, listener, open }: Begun,
    again: impl FnMut() -> Option<UnixListener>,
    roles: Roles,
    door: Door,
    cpus: Vec<u32>,
    over: impl Future<Output = Duration>,
) {
    runtime.block_on(async {
        let gate = Gate::new(roles, door.clone());
        open.into_iter().for_each(|open| drop(tokio::spawn(metrics::serve(open, door.clone()))));
        gate::serve(listener, again, router(door, gate.clone(), Cpus(cpus.into())), gate, over).await;
    });
    // A program that is being looked at holds up nobody.
    runtime.shutdown_background();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_value_is_said_without_json() {
        let text = "Failed to deserialize the JSON body into the target type: mac: no address at line 1 column 37";
        assert_eq!(plain(text), "mac: no address");
        assert_eq!(plain("Expected a body"), "Expected a body");
    }

    #[test]
    fn a_wrong_query_is_said_with_what_to_do() {
        let uri = "http://tasukid/?snap=x".parse().expect("an address");
        let Err(Refusal::Malformed(said)) = asked(Query::<Much>::try_from_uri(&uri)) else { panic!("x is no number") };
        assert!(said.contains("(snap: invalid digit") && said.contains("; /openapi.json says"), "{said}");
    }

    #[test]
    fn the_description_names_every_address_and_what_is_said_there() {
        let description: serde_json::Value = serde_json::from_str(&description()).unwrap();
        let paths: Vec<_> = description["paths"].as_object().unwrap().keys().cloned().collect();
        let expected = [
            "/v1/apply",
            "/v1/captures/{number}",
            "/v1/configuration",
            "/v1/events",
            "/v1/metrics",
            "/v1/nics",
            "/v1/nics/{name}/capture",
            "/v1/nics/{name}/counts",
            "/v1/nics/{name}/give",
            "/v1/nics/{name}/standby",
            "/v1/nodes",
            "/v1/nodes/{name}",
            "/v1/nodes/{name}/capture",
            "/v1/nodes/{name}/stage",
            "/v1/nodes/{name}/upgrade",
            "/v1/plan",
            "/v1/snapshot",
            "/v1/status",
            "/v1/stop",
            "/v1/upgrade",
            "/v1/vnis",
            "/v1/vnis/{name}/stats",
            "/v1/vnis/{name}/table",
            "/v1/workers",
        ];
        assert_eq!(paths, expected);
        let schemas = description["components"]["schemas"].as_object().unwrap();
        assert!(["Status", "Relayed", "Refused", "Give"].iter().all(|name| schemas.contains_key(*name)), "{schemas:?}");
    }

    #[test]
    fn a_path_without_a_text_is_refused_as_no_file_is_read_for_a_caller() {
        let check = |body: &str| serde_json::from_str::<Apply>(body).expect("a body").check();
        let said = check(r#"{ "path": "/etc/shadow" }"#).expect_err("it is root's");
        assert!(said.contains("tasukid reads no file for others, and /etc/shadow came without its text"), "{said}");
        for body in ["{}", r#"{ "text": "" }"#, r#"{ "path": "/etc/tasuki.toml", "text": "" }"#] {
            assert_eq!(check(body), Ok(()), "{body}");
        }
    }
}
