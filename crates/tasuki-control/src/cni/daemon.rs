//! The daemon, as the plugin asks it: with patience while it is replaced, and with the specification's codes.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use hyper::{Method, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::network::Network;
use super::{Failure, code};
use crate::api::client::{self, HungUp, NotThere, Refusal, has_status};
use crate::api::types::{NicView, NodeView};
use crate::cli::part;
use crate::config::Node;

/// Time for all that a call asks of the daemon: the kubelet gives a runtime up after two minutes (runtimeRequestTimeout).
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for one answer. When there is none to ADD, as much is left for taking the node away.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for a daemon that is being replaced to be back.
const RESTART_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for what a change of a node has to wait for: a configuration that is being applied, an upgrade of the node.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a node's first worker to be at work.
const FIRST_WORKER_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two tries.
const TRY_EVERY: Duration = Duration::from_millis(10);

/// The daemon of a network.
#[derive(Debug)]
pub struct Daemon {
    folder: PathBuf,
    /// The end of the time for the call.
    until: Instant,
}

/// Why a node was not added.
#[derive(Debug)]
pub struct NotAdded {
    pub failure: Failure,
    /// Whether it is certain that it is not there. Otherwise its addresses are not free.
    pub is_gone: bool,
}

impl From<Failure> for NotAdded {
    fn from(failure: Failure) -> Self {
        NotAdded { failure, is_gone: false }
    }
}

/// Returns the failure with the code for it.
fn failure(error: &anyhow::Error) -> Failure {
    if let Some(NotThere { .. }) = error.downcast_ref() {
        let whole = Failure::new(code::AGAIN, error.to_string());
        let details = "start it (systemctl start tasukid), or name its runtime directory (dir)".to_owned();
        return Failure { details, ..whole };
    }
    let code = match error.downcast_ref::<Refusal>().map(|refusal| refusal.status) {
        Some(StatusCode::UNPROCESSABLE_ENTITY) => code::CONFIGURATION,
        None | Some(StatusCode::SERVICE_UNAVAILABLE) => code::AGAIN,
        Some(_) => code::OTHER,
    };
    Failure::new(code, error.to_string())
}

/// Returns whether no daemon has answered, and the next one may.
fn is_away(error: &anyhow::Error) -> bool {
    error.is::<NotThere>() || error.is::<HungUp>()
}

/// Returns whether the daemon has not heard the request, and may in a moment.
fn is_busy(error: &anyhow::Error) -> bool {
    has_status(error, StatusCode::SERVICE_UNAVAILABLE)
}

/// Returns whether a node cannot be removed, and perhaps can in a moment.
fn is_held(error: &anyhow::Error) -> bool {
    is_busy(error) || has_status(error, StatusCode::CONFLICT)
}

/// Returns whether a node is the one that was asked for: no call but the one that made it has its container and its
/// namespace.
fn is_same(view: &NodeView, node: &Node) -> bool {
    let netns = node.tap().and_then(|tap| tap.netns.as_ref());
    view.name == node.name && view.container == node.container && view.netns.as_ref() == netns
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, Failure> {
    serde_json::from_value(value).map_err(|error| {
        let sentence = format!("this plugin does not understand tasukid's answer ({error}); install both anew");
        Failure::new(code::OTHER, sentence)
    })
}

impl Daemon {
    /// Returns the daemon that a network names.
    pub fn of(network: &Network) -> Self {
        Daemon { folder: network.dir.clone(), until: Instant::now() + CALL_TIMEOUT }
    }

    /// Returns it for what takes no longer than this of the time for the call.
    pub fn within(&self, time: Duration) -> Self {
        Daemon { folder: self.folder.clone(), until: self.end_of(time) }
    }

    /// Returns when a time ends that begins now: with that of the call, at the latest.
    fn end_of(&self, time: Duration) -> Instant {
        self.until.min(Instant::now() + time)
    }

    fn ask_once(&self, method: Method, address: &str, body: Option<&Value>) -> anyhow::Result<Value> {
        let left = self.until.saturating_duration_since(Instant::now());
        anyhow::ensure!(
            !left.is_zero(),
            "the tasukid in {} has taken {} s for this call, which is not done; call again, and look at its log if that does not help",
            self.folder.display(),
            CALL_TIMEOUT.as_secs()
        );
        client::ask_within(ANSWER_TIMEOUT.min(left), &self.folder, method, address, body)
    }

    /// Asks again while the daemon is replaced, and while its refusal is one that passes. A daemon that died may have done
    /// what it was asked.
    fn patiently<T>(
        &self,
        passes: impl Fn(&anyhow::Error) -> bool,
        ask: impl Fn() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let busy_until = self.end_of(BUSY_TIMEOUT);
        let mut away_until = None;
        loop {
            let error = match ask() {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            let until = if is_away(&error) {
                *away_until.get_or_insert_with(|| self.end_of(RESTART_TIMEOUT))
            } else if passes(&error) {
                away_until = None;
                busy_until
            } else {
                return Err(error);
            };
            if Instant::now() >= until {
                return Err(error);
            }
            std::thread::sleep(TRY_EVERY);
        }
    }

    /// Returns all nodes, or that there is no daemon now.
    pub fn nodes_now(&self) -> Result<Vec<NodeView>, Failure> {
        read(self.ask_once(Method::GET, "/v1/nodes", None).map_err(|error| failure(&error))?)
    }

    /// Returns all NICs and nodes' ends, or that there is no daemon now.
    pub fn nics_now(&self) -> Result<Vec<NicView>, Failure> {
        read(self.ask_once(Method::GET, "/v1/nics", None).map_err(|error| failure(&error))?)
    }

    fn get<T: DeserializeOwned>(&self, address: &str) -> Result<T, Failure> {
        let answer = self.patiently(is_busy, || self.ask_once(Method::GET, address, None));
        read(answer.map_err(|error| failure(&error))?)
    }

    /// Returns all nodes.
    pub fn nodes(&self) -> Result<Vec<NodeView>, Failure> {
        self.get("/v1/nodes")
    }

    /// Returns the containers of all nodes.
    pub fn containers(&self) -> Result<Vec<String>, Failure> {
        Ok(self.nodes()?.into_iter().filter_map(|node| node.container).collect())
    }

    /// Returns the node of a container's interface, if there is one.
    pub fn node_of(&self, container: &str) -> Result<Option<NodeView>, Failure> {
        Ok(self.nodes()?.into_iter().find(|node| node.container.as_deref() == Some(container)))
    }

    /// Adds the node of a container's interface, and waits until its worker is at work. If that fails, takes it away again.
    pub fn add(&self, node: &Node) -> Result<(), NotAdded> {
        let body = serde_json::to_value(node).expect("plain data");
        let may_be_there = Cell::new(false);
        let added = self.patiently(is_busy, || {
            if may_be_there.get() {
                let nodes: Vec<NodeView> = serde_json::from_value(self.ask_once(Method::GET, "/v1/nodes", None)?)?;
                if nodes.iter().any(|it| is_same(it, node)) {
                    return Ok(());
                }
            }
            let posted = self.ask_once(Method::POST, "/v1/nodes", Some(&body));
            may_be_there.set(may_be_there.get() || posted.as_ref().is_err_and(|error| error.is::<HungUp>()));
            posted.map(drop)
        });
        if let Err(error) = added {
            // One that is there though this one is refused is another call's.
            let is_refused = error.is::<Refusal>() && !has_status(&error, StatusCode::SERVICE_UNAVAILABLE);
            let is_away = error.is::<Refusal>() || error.is::<NotThere>();
            let is_gone = is_refused || is_away && !may_be_there.get();
            return Err(self.take_away(node, NotAdded { failure: failure(&error), is_gone }));
        }
        self.await_worker(&node.name).map_err(|why| self.take_away(node, why))
    }

    fn take_away(&self, node: &Node, NotAdded { failure, is_gone }: NotAdded) -> NotAdded {
        let is_removed = || node.container.as_ref().is_some_and(|container| self.remove(container).is_ok());
        NotAdded { failure, is_gone: is_gone || is_removed() }
    }

    /// Waits until a worker drives the node's end of its VNI.
    pub fn await_worker(&self, node: &str) -> Result<(), NotAdded> {
        let until = self.end_of(FIRST_WORKER_TIMEOUT);
        loop {
            let ends: Vec<NicView> = self.get("/v1/nics")?;
            let its = ends.into_iter().find(|end| end.node == node);
            if its.as_ref().is_some_and(|end| end.worker.is_some()) {
                return Ok(());
            }
            if its.is_none() && self.nodes()?.iter().all(|it| it.name != node) {
                let sentence =
                    format!("node {node} was removed before it was at work; call again if it is still wanted");
                return Err(NotAdded { failure: Failure::new(code::AGAIN, sentence), is_gone: true });
            }
            if Instant::now() > until {
                let trouble = self.nodes()?.into_iter().find(|it| it.name == node);
                let trouble = trouble.and_then(|it| it.trouble).or(its.and_then(|end| end.trouble));
                let trouble = trouble.unwrap_or_else(|| "it has no worker".to_owned());
                // What to do about a node that stays there is not what to do about one that is removed now.
                let why = trouble.split_once("; ").map_or(&trouble[..], |(why, _)| why);
                let seconds = FIRST_WORKER_TIMEOUT.as_secs();
                let sentence =
                    format!("node {node} is not at work after {seconds} s: {why}; the events (tasuki events) say more");
                return Err(Failure::new(code::AGAIN, sentence).into());
            }
            std::thread::sleep(TRY_EVERY);
        }
    }

    /// Removes the node of a container's interface, if there is one.
    pub fn remove(&self, container: &str) -> Result<(), Failure> {
        let Some(node) = self.node_of(container)? else { return Ok(()) };
        let address = format!("/v1/nodes/{}", part(&node.name));
        match self.patiently(is_held, || self.ask_once(Method::DELETE, &address, None)) {
            Err(error) if !has_status(&error, StatusCode::NOT_FOUND) => Err(match is_held(&error) {
                true => Failure { code: code::AGAIN, ..failure(&error) },
                false => failure(&error),
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::place;

    /// Answers a request each with these statuses and bodies, in this order, as tasukid does; with status 0, hangs up.
    /// Returns the requests' first words.
    pub(crate) fn answers(folder: &Path, all: Vec<(u16, Value)>) -> std::thread::JoinHandle<Vec<String>> {
        let socket = UnixListener::bind(place::api_socket(folder)).expect("a socket");
        std::thread::spawn(move || {
            let mut asked = Vec::new();
            for (status, body) in all {
                let (mut stream, _) = socket.accept().expect("a caller");
                let mut lines = BufReader::new(stream.try_clone().expect("a descriptor"));
                let head: Vec<String> =
                    lines.by_ref().lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
                let length = head
                    .iter()
                    .find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
                lines.read_exact(&mut vec![0; length.unwrap_or(0)]).expect("a body");
                asked.push(head[0].split(' ').take(2).collect::<Vec<_>>().join(" "));
                if status == 0 {
                    continue;
                }
                let body = body.to_string();
                write!(stream, "HTTP/1.1 {status} Said\r\ncontent-length: {}\r\n\r\n{body}", body.len())
                    .expect("a caller");
            }
            asked
        })
    }

    fn refused(why: &str) -> Value {
        json!({ "error": why, "relays": [] })
    }

    /// The node of a container, as it is posted.
    fn node() -> Node {
        let text = json!({
            "name": "cni-4f3c", "container": "lan/4f3c/eth0", "vni": "lan",
            "work": { "tap": { "name": "eth0", "netns": "/run/netns/4f3c" } },
        });
        crate::config::Config::node_of(&text).expect("a node")
    }

    /// The list of nodes with that one.
    fn with_it() -> Value {
        json!([{
            "name": "cni-4f3c", "work": "", "workers": [], "nics": [], "generation": 0, "container": "lan/4f3c/eth0",
            "netns": "/run/netns/4f3c",
        }])
    }

    pub(crate) fn daemon(folder: &Path) -> Daemon {
        Daemon { folder: folder.to_owned(), until: Instant::now() + CALL_TIMEOUT }
    }

    #[test]
    fn a_node_is_added_and_removed_once_a_configuration_is_applied_and_other_refusals_are_told_at_once() {
        let applying = || (503, refused("a configuration is being applied; ask again when that is done"));
        let folder = tempfile::tempdir().expect("a folder");
        let asked = answers(
            folder.path(),
            vec![
                applying(),
                applying(),
                (409, refused("node \"cni-4f3c\" has no TAP; name another")),
                (200, with_it()),
                applying(),
                (409, refused("an upgrade or a handover of node cni-4f3c is under way; ask again")),
                (200, json!({})),
            ],
        );
        let daemon = daemon(folder.path());
        let NotAdded { failure, is_gone } = daemon.add(&node()).expect_err("the daemon refuses");
        assert_eq!((failure.sentence(), is_gone), ("node \"cni-4f3c\" has no TAP; name another".to_owned(), true));
        daemon.remove("lan/4f3c/eth0").expect("it is removed");
        let asked = asked.join().expect("an end");
        let [post, delete] = ["POST /v1/nodes", "DELETE /v1/nodes/cni-4f3c"];
        assert_eq!(asked, [post, post, post, "GET /v1/nodes", delete, delete, delete]);
    }

    #[test]
    fn a_daemon_that_dies_before_it_answers_is_asked_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let dies = || (0, Value::Null);
        let refuses = || (422, refused("no CPU 9; name one"));
        let mut other = with_it();
        other[0]["netns"] = json!("/run/netns/other");
        let all = vec![
            // It had not made the node.
            dies(),
            dies(),
            (200, json!([])),
            refuses(),
            // The node is another call's.
            dies(),
            (200, other),
            refuses(),
            // It had made the node, which another call has removed since.
            dies(),
            (200, with_it()),
            dies(),
            (200, json!([])),
            (200, json!([])),
            // It had removed the node.
            dies(),
            (200, with_it()),
            dies(),
            (404, refused("there is no node")),
        ];
        let asked = answers(folder.path(), all);
        let daemon = daemon(folder.path());
        let add = || {
            let NotAdded { failure, is_gone } = daemon.add(&node()).expect_err("it fails");
            assert!(is_gone, "{failure:?}");
            failure.msg
        };
        assert_eq!([add(), add()], ["no CPU 9"; 2]);
        assert_eq!(add(), "node cni-4f3c was removed before it was at work");
        daemon.remove("lan/4f3c/eth0").expect("it is removed");
        let [get, post, delete] = ["GET /v1/nodes", "POST /v1/nodes", "DELETE /v1/nodes/cni-4f3c"];
        let (ends, of_removal) = ("GET /v1/nics", [get, get, delete, delete]);
        let of_adding = [post, get, get, post, post, get, post, post, get, ends, ends, get];
        assert_eq!(asked.join().expect("an end"), [&of_adding[..], &of_removal].concat());
    }

    #[test]
    fn a_daemon_that_stands_still_is_given_up_whatever_the_call_has_to_ask() {
        let folder = tempfile::tempdir().expect("a folder");
        // The kernel takes requests for it, and nobody reads them.
        let _socket = UnixListener::bind(place::api_socket(folder.path())).expect("a socket");
        let daemon = Daemon { folder: folder.path().to_owned(), until: Instant::now() + Duration::from_millis(50) };
        let silent = daemon.remove("lan/4f3c/eth0").expect_err("nobody answers");
        assert!(silent.code == code::AGAIN && silent.msg.contains("has not answered for"), "{silent:?}");
        let said = client::ask_within(Duration::ZERO, folder.path(), Method::GET, "/v1/nodes", None);
        let said = format!("{:#}", said.expect_err("nobody answers"));
        assert!(said.ends_with("workers go on meanwhile"), "a sentence, and no timer's words after it: {said}");
        for container in 0..1000 {
            let later = daemon.remove(&format!("lan/{container}/eth0")).expect_err("the time is over");
            assert!(later.code == code::AGAIN && later.msg.contains("has taken 60 s for this call"), "{later:?}");
        }
    }
}
