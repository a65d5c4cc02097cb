//! The entrance to the API: roles of callers, bounds on connections, deadlines for requests, and the audit log.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::io::Write;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Extension, MatchedPath, Request, State};
use axum::http::header::CONNECTION;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

use super::peer::Peer;
use super::roles::{Role, Roles, needed};
use super::types::Refused;
use crate::bucket::Bucket;
use crate::supervisor::door::{Door, Request as Asked};
use crate::supervisor::now;

/// Connections at once.
const CONNECTIONS_MAX: usize = 256;
/// Connections of one user with a role.
const USER_CONNECTIONS_MAX: usize = 64;
/// Connections of all users without a role together, so that they cannot keep out users with one.
const STRANGER_CONNECTIONS_MAX: usize = 16;
/// Connections at once that are refused once their request has come: clients take no answer before that.
const REFUSED_MAX: usize = 64;
/// Time a caller may take for the head of a request, and until it begins the next one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Time a caller may take for the body of a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a body.
const BODY_MAX: usize = 256 << 10;
/// Bytes of one with a configuration: of any that tasukid begins with, with what JSON adds to it.
const CONFIGURATION_BODY_MAX: usize = 10 << 20;
/// Time callers may take to read their answers when the daemon ends; and when it goes on as another program: for that time
/// nobody hears a death.
pub const LAST_ANSWERS_TIMEOUT: Duration = Duration::from_secs(2);
pub const LAST_ANSWERS_TIMEOUT_REPLACED: Duration = Duration::from_millis(100);
/// Interval at which the daemon asks whether its socket is there.
const SOCKET_LOOK_EVERY: Duration = Duration::from_secs(1);
/// Lines that one user with a role may put into the audit log at once, and the time until it may put in one more.
const LINES_AT_ONCE_MAX: u32 = 20;
const LINE_EVERY: Duration = Duration::from_secs(1);
/// The same time for all users without a role together: they overwrite few of the events in an hour.
const STRANGERS_LINE_EVERY: Duration = Duration::from_secs(60);
/// Users whose lines are counted apart.
const USERS_MAX: usize = 1024;

/// The state that all connections share.
#[derive(Debug, Clone)]
pub struct Gate(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    roles: Roles,
    /// The daemon's user.
    own: u32,
    door: Door,
    seats: Mutex<BTreeMap<Option<u32>, usize>>,
    refused: Semaphore,
    lines: Mutex<Lines>,
}

/// A permit for one connection. Each user with a role has permits of its own; users without a role share theirs.
struct Seat {
    gate: Gate,
    of: Option<u32>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.gate.seats();
        if let Some(taken) = seats.get_mut(&self.of) {
            *taken -= 1;
            if *taken == 0 {
                seats.remove(&self.of);
            }
        }
    }
}

impl Gate {
    /// Creates a gate with these roles, into the loop behind this door.
    pub fn new(roles: Roles, door: Door) -> Self {
        let own = rustix::process::geteuid().as_raw();
        Gate(Arc::new(Inner {
            roles,
            own,
            door,
            seats: Mutex::default(),
            refused: Semaphore::new(REFUSED_MAX),
            lines: Mutex::default(),
        }))
    }

    fn seats(&self) -> MutexGuard<'_, BTreeMap<Option<u32>, usize>> {
        self.0.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits one more connection, or says why not.
    fn seat(&self, peer: &Peer) -> Result<Seat, String> {
        let of = self.0.roles.of(peer, self.0.own).map(|_| peer.uid);
        let mut seats = self.seats();
        let taken = seats.get(&of).copied().unwrap_or(0);
        let all: usize = seats.values().sum();
        match of {
            Some(uid) if taken >= USER_CONNECTIONS_MAX => {
                return Err(format!("user {uid} has {taken} connections to tasukid, and may have no more; close some"));
            }
            None if taken >= STRANGER_CONNECTIONS_MAX => {
                return Err(format!("users without a role have {taken} connections to tasukid, and may have no more"));
            }
            // The daemon's own user gets in however many other users are connected.
            of if of != Some(self.0.own) && all >= CONNECTIONS_MAX - USER_CONNECTIONS_MAX => {
                return Err("tasukid has as many connections as it takes; ask again later".to_owned());
            }
            _ => {}
        }
        *seats.entry(of).or_default() += 1;
        Ok(Seat { gate: self.clone(), of })
    }

    /// Writes a request, its caller and its outcome to the audit log.
    fn write_down(&self, peer: &Peer, asked: &str, outcome: &str, is_last: bool) {
        let of = self.0.roles.of(peer, self.0.own).map(|_| peer.uid);
        let whose = if of.is_some() { "of this user's" } else { "of users without a role" };
        let left_out = self.0.lines.lock().unwrap_or_else(PoisonError::into_inner).take(of, now());
        let Some(left_out) = left_out else { return };
        let mut sentence =
            format!("user {} ({}, process {}) asked {asked}: {outcome}", peer.uid, peer.program, peer.pid);
        if left_out > 0 {
            sentence += &format!("; {left_out} {whose} before that were left out");
        }
        // The last line goes to the log directly: the loop that makes events has ended.
        match is_last {
            true => tracing::info!("{sentence}"),
            false => self.0.door.put(Asked::Note(sentence)),
        }
    }
}

/// The lines that users may write into the audit log. Those without a role share theirs: a local user can have tens of
/// thousands of user IDs (/etc/subuid).
#[derive(Debug, Default)]
struct Lines(BTreeMap<Option<u32>, Bucket>);

impl Lines {
    /// Takes a line for a user with a role, or for those without one. Returns how many lines before it were left out, or `None`
    /// if this one must be, too.
    fn take(&mut self, of: Option<u32>, now: Duration) -> Option<u64> {
        if self.0.len() >= USERS_MAX && !self.0.contains_key(&of) {
            self.0.retain(|_, bucket| !bucket.is_full(now));
        }
        // With more than that, the rest of them share those of users without a role.
        let of = of.filter(|_| self.0.len() < USERS_MAX || self.0.contains_key(&of));
        let each = if of.is_some() { LINE_EVERY } else { STRANGERS_LINE_EVERY };
        let bucket = self.0.entry(of).or_insert_with(|| Bucket::new(LINES_AT_ONCE_MAX, each, now));
        let left_out = bucket.left_out(now);
        bucket.take(now).then(|| left_out.unwrap_or(0))
    }
}

fn refusal(status: StatusCode, error: String) -> Response {
    (status, axum::Json(Refused { error, relays: Vec::new() })).into_response()
}

/// The line of a request that changes something. It is written when this is dropped, also if the caller has hung up: then hyper
/// drops the request, though the daemon's loop may have carried it out, or goes on with it.
struct Record<'a> {
    gate: &'a Gate,
    peer: &'a Peer,
    asked: &'a str,
    /// The status of the answer, and whether the loop that makes events has ended.
    outcome: Option<(StatusCode, bool)>,
}

impl Record<'_> {
    fn end(mut self, status: StatusCode, is_last: bool) {
        self.outcome = Some((status, is_last));
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        let (outcome, is_last) = match self.outcome {
            Some((status, is_last)) if status.is_success() => (format!("done ({})", status.as_u16()), is_last),
            Some((status, _)) => (format!("refused ({})", status.as_u16()), false),
            None => ("the caller hung up before the answer".to_owned(), false),
        };
        self.gate.write_down(self.peer, self.asked, &outcome, is_last);
    }
}

/// Admits a request if its caller has the role for it and has sent all of it in time. A request that changes
/// something, or was refused, goes into the audit log.
pub async fn guard(
    State(gate): State<Gate>,
    Extension(peer): Extension<Arc<Peer>>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(|route| route.as_str().to_owned()).unwrap_or_default();
    let needed = needed(request.method(), &route);
    let path: String = request.uri().path().chars().take(200).collect();
    let asked = format!("{} {path}", request.method());
    let changes = needed > Role::Read;
    let role = match gate.0.roles.of(&peer, gate.0.own) {
        Some(role) if role >= needed => role,
        role => {
            gate.write_down(&peer, &asked, "refused", false);
            return refusal(StatusCode::FORBIDDEN, may_not(&peer, role, needed));
        }
    };
    let (mut parts, body) = request.into_parts();
    // A reader may ask these routes, too, with methods that they do not have.
    let has_configuration = needed == Role::Administer && ["/v1/plan", "/v1/apply"].contains(&route.as_str());
    let most = if has_configuration { CONFIGURATION_BODY_MAX } else { BODY_MAX };
    let too_long = || format!("the body of the request is incomplete, or longer than {most} bytes");
    if body.size_hint().lower() > most as u64 {
        return refusal(StatusCode::PAYLOAD_TOO_LARGE, too_long());
    }
    let bytes = match tokio::time::timeout(BODY_TIMEOUT, axum::body::to_bytes(body, most)).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(_)) => return refusal(StatusCode::PAYLOAD_TOO_LARGE, too_long()),
        Err(_) => return refusal(StatusCode::REQUEST_TIMEOUT, too_slow("body", BODY_TIMEOUT)),
    };
    parts.extensions.insert(role);
    // If the caller has hung up while tasukid stood still, its connection sees that first, and this request ends here.
    tokio::task::yield_now().await;
    let is_last = ["/v1/stop", "/v1/upgrade"].contains(&route.as_str()) && parts.method == Method::POST;
    let record = changes.then(|| Record { gate: &gate, peer: &peer, asked: &asked, outcome: None });
    let answer = next.run(Request::from_parts(parts, Body::from(bytes))).await;
    if let Some(record) = record {
        record.end(answer.status(), is_last);
    }
    answer
}

/// Returns the sentence for a caller whose role is not enough.
pub fn may_not(peer: &Peer, role: Option<Role>, needed: Role) -> String {
    let has = role.map_or("none".to_owned(), |role| format!("{:?}", role.name()));
    format!(
        "user {} may not do that: it takes the role {:?}, and this user has {has}; the daemon's configuration assigns roles, under [api]",
        peer.uid,
        needed.name()
    )
}

fn too_slow(what: &str, within: Duration) -> String {
    format!("the {what} of a request must be here within {} s", within.as_secs())
}

/// Serves until `over`, which says for how long the last answers may take. Requests that have begun by then run to their end, if
/// their callers read the answers. `again` is asked each second for another socket.
pub async fn serve(
    mut listener: UnixListener,
    mut again: impl FnMut() -> Option<std::os::unix::net::UnixListener>,
    router: Router,
    gate: Gate,
    over: impl Future<Output = Duration>,
) {
    let mut looks = tokio::time::interval(SOCKET_LOOK_EVERY);
    let mut connections = JoinSet::new();
    let (ends, is_over) = watch::channel(false);
    let mut over = pin!(over);
    let for_answers = loop {
        tokio::select! {
            for_answers = &mut over => break for_answers,
            Some(_) = connections.join_next() => {}
            _ = looks.tick() => {
                let made = again().filter(|made| made.set_nonblocking(true).is_ok());
                if let Some(made) = made.and_then(|made| UnixListener::from_std(made).ok()) {
                    listener = made;
                }
            }
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(converse(stream, router.clone(), gate.clone(), is_over.clone()));
                }
                // Most of the time the daemon is out of descriptors: other connections will end.
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            },
        }
    };
    drop(listener);
    let _ = ends.send(true);
    // A capture that no caller reads does not keep the daemon from ending.
    let _ = tokio::time::timeout(for_answers, async { while connections.join_next().await.is_some() {} }).await;
}

/// Serves one connection, to its end.
async fn converse(stream: UnixStream, router: Router, gate: Gate, mut is_over: watch::Receiver<bool>) {
    let Ok(peer) = Peer::of(&stream) else { return };
    let (_seat, _permit, router) = match gate.seat(&peer) {
        Ok(seat) => (Some(seat), None, router),
        Err(why) => match gate.0.refused.try_acquire() {
            Ok(permit) => (None, Some(permit), refusing(why)),
            Err(_) => return hang_up(stream, "503 Service Unavailable", &why),
        },
    };
    let peer = Arc::new(peer);
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(Arc::clone(&peer));
        Box::pin(TowerToHyperService::new(router.clone()).call(request))
    });
    let io = TokioIo::new(stream);
    let mut serving =
        http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT).serve_connection(io, service);
    let mut is_ending = false;
    let ended = loop {
        tokio::select! {
            ended = poll_fn(|context| serving.poll_without_shutdown(context)) => break ended,
            _ = is_over.changed(), if !is_ending => {
                is_ending = true;
                Pin::new(&mut serving).graceful_shutdown();
            }
        }
    };
    if ended.is_err_and(|error| error.is_timeout()) {
        hang_up(serving.into_parts().io.into_inner(), "408 Request Timeout", &too_slow("head", HEAD_TIMEOUT));
    }
}

/// Returns the service of a connection for which there is no room: it reads the request, and refuses it.
fn refusing(why: String) -> Router {
    Router::new().fallback(move |request: Request| {
        let why = why.clone();
        async move {
            let (mut body, mut len) = (request.into_body(), 0);
            let read = async {
                // None of it is kept.
                while let Some(Ok(part)) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await
                    && len <= CONFIGURATION_BODY_MAX
                {
                    len += part.data_ref().map_or(0, |bytes| bytes.len());
                }
            };
            let _ = tokio::time::timeout(BODY_TIMEOUT, read).await;
            ([(CONNECTION, "close")], refusal(StatusCode::SERVICE_UNAVAILABLE, why))
        }
    })
}

/// Sends the reason before it hangs up, if there is room for it.
fn hang_up(stream: UnixStream, status: &str, why: &str) {
    let body = serde_json::to_string(&Refused { error: why.to_owned(), relays: Vec::new() }).expect("plain data");
    let len = body.len();
    let text = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\nconnection: close\r\n\r\n{body}"
    );
    if let Ok(mut stream) = stream.into_std() {
        let _ = stream.write_all(text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::client;
    use crate::api::roles::Who;

    #[test]
    fn users_without_a_role_keep_out_nobody_who_has_one() {
        let (sender, _requests) = std::sync::mpsc::channel();
        let roles = Roles { read: vec![Who::User(5)], ..Roles::default() };
        let gate = Gate::new(roles, Door::new(sender).unwrap());
        let peer = |uid| Peer { uid, groups: Vec::new(), pid: 1, program: String::new() };
        let strangers: Vec<_> = (100_000..101_000).filter_map(|uid| gate.seat(&peer(uid)).ok()).collect();
        assert_eq!(strangers.len(), STRANGER_CONNECTIONS_MAX);
        assert!(gate.seat(&peer(100_000)).is_err_and(|why| why.contains("users without a role have 16 connections")));
        let readers: Vec<_> = (0..1000).filter_map(|_| gate.seat(&peer(5)).ok()).collect();
        assert_eq!(readers.len(), USER_CONNECTIONS_MAX);
        assert!(gate.seat(&peer(gate.0.own)).is_ok());
        drop((strangers, readers));
        assert!(gate.seats().is_empty(), "a caller that hung up has no place");
    }

    #[tokio::test]
    async fn a_change_whose_caller_hangs_up_before_the_answer_is_in_the_record() {
        let (sender, requests) = std::sync::mpsc::channel();
        let gate = Gate::new(Roles::default(), Door::new(sender).unwrap());
        let (begins, mut begun) = tokio::sync::mpsc::unbounded_channel();
        let answers = async move || {
            begins.send(()).unwrap();
            std::future::pending::<()>().await;
        };
        let router = Router::new()
            .route("/v1/nodes/{name}/upgrade", axum::routing::post(answers.clone()))
            .route("/v1/status", axum::routing::get(answers))
            .layer(axum::middleware::from_fn_with_state(gate.clone(), guard));
        let peer = Arc::new(Peer { uid: gate.0.own, groups: Vec::new(), pid: 7, program: "curl".to_owned() });
        for (method, path, line) in [
            ("POST", "/v1/nodes/red/upgrade", Some("POST /v1/nodes/red/upgrade: the caller hung up before the answer")),
            ("GET", "/v1/status", None),
        ] {
            let request = Request::builder().method(method).uri(path).extension(Arc::clone(&peer));
            let request = request.body(Body::empty()).unwrap();
            tokio::select! {
                answer = TowerToHyperService::new(router.clone()).call(request) => panic!("{answer:?}"),
                begun = begun.recv() => begun.unwrap(),
            }
            let written = requests.try_recv().ok().map(|(request, _)| match request {
                Asked::Note(sentence) => sentence,
                other => panic!("{other:?}"),
            });
            assert_eq!(written.as_ref().and_then(|written| Some(written.split_once(" asked ")?.1)), line);
        }
    }

    /// The clock stands still but where all wait for it.
    #[tokio::test(start_paused = true)]
    async fn a_caller_who_reads_nothing_holds_up_another_program_for_a_moment_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api.sock");
        for most in [LAST_ANSWERS_TIMEOUT_REPLACED, LAST_ANSWERS_TIMEOUT] {
            let _ = std::fs::remove_file(&path);
            let listener = UnixListener::bind(&path).unwrap();
            let (sender, _requests) = std::sync::mpsc::channel();
            let gate = Gate::new(Roles::default(), Door::new(sender).unwrap());
            let (begins, mut begun) = tokio::sync::mpsc::unbounded_channel();
            let answers = async move || {
                begins.send(tokio::time::Instant::now()).unwrap();
                vec![0; 64 << 20]
            };
            let router = Router::new().route("/", axum::routing::get(answers));
            let mut caller = std::os::unix::net::UnixStream::connect(&path).unwrap();
            caller.write_all(b"GET / HTTP/1.1\r\nhost: tasukid\r\n\r\n").unwrap();
            let since = std::cell::Cell::new(None);
            let over = async {
                since.set(begun.recv().await);
                most
            };
            serve(listener, || None, router, gate, over).await;
            assert_eq!(since.get().unwrap().elapsed(), most);
        }
    }

    #[test]
    fn a_client_for_which_there_is_no_room_hears_why() {
        let folder = tempfile::tempdir().unwrap();
        let (sender, _requests) = std::sync::mpsc::channel();
        let gate = Gate::new(Roles::default(), Door::new(sender).unwrap());
        let peer = Peer { uid: gate.0.own, groups: Vec::new(), pid: 1, program: String::new() };
        let _seats: Vec<_> = std::iter::from_fn(|| gate.seat(&peer).ok()).collect();
        let (path, served) = (folder.path().join("api.sock"), gate.clone());
        let listener = std::os::unix::net::UnixListener::bind(path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (ends, over) = tokio::sync::oneshot::channel();
        let server = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = UnixListener::from_std(listener).unwrap();
                serve(listener, || None, Router::new(), served, async { over.await.unwrap() }).await;
            });
        });
        let long = serde_json::json!({ "name": "x".repeat(2_000_000) });
        for _ in 0..20 {
            for (method, body) in [(Method::GET, None), (Method::POST, Some(&long))] {
                let refused = client::ask(folder.path(), method, "/v1/nodes", body).unwrap_err().to_string();
                assert!(refused.contains("has 64 connections to tasukid"), "{refused}");
            }
        }
        ends.send(LAST_ANSWERS_TIMEOUT).unwrap();
        server.join().unwrap();
    }

    #[test]
    fn lines_beyond_what_one_may_write_are_counted() {
        let mut lines = Lines::default();
        let begin = Duration::from_secs(7);
        let written = (0..100).filter(|_| lines.take(Some(5), begin).is_some()).count();
        assert_eq!((written, lines.take(Some(5), begin + LINE_EVERY / 2)), (20, None));
        assert_eq!(lines.take(Some(5), begin + LINE_EVERY * 2), Some(81));
        assert_eq!(lines.take(Some(5), begin + LINE_EVERY * 9), Some(0));
    }

    #[test]
    fn any_number_of_users_without_a_role_write_no_more_lines_than_one() {
        let (sender, requests) = std::sync::mpsc::channel();
        let roles = Roles { read: vec![Who::Group(9)], ..Roles::default() };
        let gate = Gate::new(roles, Door::new(sender).unwrap());
        for uid in 100_000..110_000 {
            let peer = Peer { uid, groups: Vec::new(), pid: 1, program: String::new() };
            gate.write_down(&peer, "GET /v1/status", "refused", false);
        }
        // One more comes each minute, in which a busy machine may have stood still.
        let written = std::iter::from_fn(|| requests.try_recv().ok()).count();
        assert!((20..30).contains(&written), "{written}");
        // Nor do any number of users with one.
        let mut lines = Lines::default();
        let taken = (0..1200).flat_map(|uid| std::iter::repeat_n(Some(uid), 30));
        let taken = taken.filter(|uid| lines.take(*uid, Duration::ZERO).is_some()).count();
        assert!(lines.0.len() <= USERS_MAX + 1 && taken <= (USERS_MAX + 1) * 20, "{taken}");
    }
}
