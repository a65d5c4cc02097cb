//! The daemon's counts for Prometheus, in its text format (version 0.0.4), and the listener for its server.

use std::fmt::{Display, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, Semaphore, oneshot};
use utoipa::ToSchema;

use super::types::{NicView, NodeView, QueueView, Status, TalkView, WorkerView};
use crate::supervisor::door::{Door, Request};

/// Connections at once: a server of Prometheus has one or two.
const CONNECTIONS_MAX: usize = 16;
/// Time for a request, and between two of a connection.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// Age up to which counts are passed on to anybody: the loop that answers for them also replaces dead drivers.
const COUNTS_AGE_MAX: Duration = Duration::from_secs(1);

/// All that is counted, at one moment: the text is made of it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Metrics {
    /// The daemon, its nodes and NICs.
    pub status: Status,
    /// Views of all workers.
    pub workers: Vec<WorkerView>,
    /// The counts of each VNI, by its name.
    pub vnis: Vec<(String, Vec<TalkView>)>,
    /// Number of the last event.
    pub last_event: u64,
}

/// The text, which grows by families of samples.
#[derive(Debug, Default)]
struct Text(String);

/// Names and values.
type Labels<'a> = &'a [(&'static str, &'a dyn Display)];

/// A family of samples of a kind of thing: its name, its help, and the value.
type Family<T> = (&'static str, &'static str, fn(&T) -> u64);

impl Text {
    /// Begins a family.
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP tasuki_{name} {help}\n# TYPE tasuki_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: Labels<'_>, value: impl Display) {
        let all: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(&value.to_string()))).collect();
        let labels = if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) };
        let _ = writeln!(self.0, "tasuki_{name}{labels} {value}");
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Metrics {
    /// Returns the text.
    pub fn text(&self) -> String {
        let mut text = Text::default();
        let Status { version, up_ms, adopted, trouble, configuration, nodes, nics, .. } = &self.status;
        text.family("info", "gauge", "The daemon; always 1.");
        text.sample("info", &[("version", version)], 1);
        text.family("up_seconds", "gauge", "Time since the daemon began.");
        text.sample("up_seconds", &[], seconds(*up_ms, 3));
        text.family("adopted_workers", "gauge", "Workers that the daemon took over from an earlier one.");
        text.sample("adopted_workers", &[], adopted);
        text.family("trouble", "gauge", "1 while the registry cannot be written, or no keeper runs.");
        text.sample("trouble", &[], u8::from(trouble.is_some()));
        text.family("events_total", "counter", "Events so far, over all daemons of the runtime directory.");
        text.sample("events_total", &[], self.last_event);
        text.family("configuration_generation", "gauge", "Number of the configuration.");
        text.sample("configuration_generation", &[], configuration.generation);
        text.family("configuration_drift_steps", "gauge", "Steps to what the configuration describes.");
        text.sample("configuration_drift_steps", &[], configuration.drift.len());
        self.nodes(&mut text, nodes);
        Self::queues(&mut text, nodes);
        self.workers(&mut text);
        Self::nics(&mut text, nics);
        self.vnis(&mut text);
        text.0
    }

    fn nodes(&self, text: &mut Text, nodes: &[NodeView]) {
        text.family("node_workers", "gauge", "Workers of the node.");
        nodes.iter().for_each(|node| text.sample("node_workers", &[("node", &node.name)], node.workers.len()));
        text.family("node_upgrades_total", "counter", "Upgrades of the node.");
        nodes.iter().for_each(|node| text.sample("node_upgrades_total", &[("node", &node.name)], node.generation));
        text.family("node_trouble", "gauge", "1 while the node lacks workers that it should have.");
        for node in nodes {
            text.sample("node_trouble", &[("node", &node.name)], u8::from(node.trouble.is_some()));
        }
        text.family("node_client", "gauge", "1 while a program is connected at the node's socket.");
        for (node, client) in nodes.iter().filter_map(|node| Some((&node.name, node.client.as_ref()?))) {
            text.sample("node_client", &[("node", node)], u8::from(client.is != "away"));
        }
    }

    fn queues(text: &mut Text, nodes: &[NodeView]) {
        let queues = || {
            let machines = nodes.iter().filter_map(|node| Some((&node.name, node.vm.as_ref()?)));
            machines.flat_map(|(name, vm)| vm.queues.iter().map(move |queue| (name, queue)))
        };
        let families: [Family<QueueView>; 5] = [
            ("vm_queue_packets_total", "Frames by a queue of the node's virtual machine.", |it| it.packets),
            ("vm_queue_bytes_total", "Bytes of these frames.", |it| it.bytes),
            ("vm_queue_kicks_total", "How often the guest woke the node's worker.", |it| it.kicks),
            ("vm_queue_interrupts_total", "Interrupts of the guest.", |it| it.interrupts),
            ("vm_queue_suppressed_total", "How often the guest was shown frames without one.", |it| it.suppressed),
        ];
        for (name, help, count) in families {
            text.family(name, "counter", help);
            for (node, queue) in queues() {
                text.sample(name, &[("node", node), ("queue", &queue.queue)], count(queue));
            }
        }
        let name = "vm_queue_drops_total";
        text.family(name, "counter", "Frames by the queue that were dropped.");
        for (node, queue) in queues() {
            let QueueView { drops_no_room, drops_length, drops_other, .. } = queue;
            for (reason, count) in [("no_room", drops_no_room), ("length", drops_length), ("other", drops_other)] {
                text.sample(name, &[("node", node), ("queue", &queue.queue), ("reason", &reason)], count);
            }
        }
    }

    fn workers(&self, text: &mut Text) {
        let families: [Family<WorkerView>; 5] = [
            ("received", "Frames that the worker has received.", |it| it.received),
            (
                "sent",
                "Frames that the worker has sent; of a program of its own, also those that did not cross.",
                |it| it.sent,
            ),
            (
                "missing",
                "Numbers of frames that were passed over; of those that came later, late counts the frames.",
                |it| it.missing,
            ),
            ("late", "Numbered frames that came twice or late.", |it| it.late),
            ("refused", "Frames that the node's TAP or the card did not take, or that did not cross.", |it| it.refused),
        ];
        for (name, help, count) in families {
            let name = format!("worker_{name}_frames_total");
            text.family(&name, "counter", help);
            for worker in &self.workers {
                text.sample(&name, &[("node", &worker.node), ("worker", &worker.worker)], count(worker));
            }
        }
        let name = "worker_dropped_frames_total";
        text.family(name, "counter", "Frames of a node on a VNI that did not cross.");
        for worker in &self.workers {
            for (reason, count) in &worker.dropped {
                let labels: Labels<'_> = &[("node", &worker.node), ("worker", &worker.worker), ("reason", reason)];
                text.sample(name, labels, count);
            }
        }
    }

    fn nics(text: &mut Text, nics: &[NicView]) {
        text.family("nic_driven", "gauge", "1 while a worker of the node drives the NIC.");
        for nic in nics {
            text.sample("nic_driven", &[("nic", &nic.name), ("node", &nic.node)], u8::from(nic.is == "driven"));
        }
        text.family(
            "nic_link_up",
            "gauge",
            "1 while the NIC's link is up, 0 while it is down; nothing while no worker drives it.",
        );
        for (nic, link) in nics.iter().filter_map(|nic| Some((nic, nic.link.as_ref()?))) {
            text.sample("nic_link_up", &[("nic", &nic.name), ("node", &nic.node)], u8::from(link == "up"));
        }
        let name = "nic_dropped_by_kernel_frames_total";
        text.family(name, "counter", "Frames that the kernel dropped between the worker and a namespace's interface.");
        for nic in nics {
            for (reason, count) in &nic.dropped_by_kernel {
                text.sample(name, &[("nic", &nic.name), ("node", &nic.node), ("reason", reason)], count);
            }
        }
        text.family("nic_failed_over", "gauge", "1 while the NIC is at its stand-by node, to which it failed over.");
        for nic in nics {
            text.sample("nic_failed_over", &[("nic", &nic.name)], u8::from(nic.failed_over.is_some()));
        }
        text.family("nic_relays_total", "counter", "How often the NIC was taken and driven.");
        nics.iter().for_each(|nic| text.sample("nic_relays_total", &[("nic", &nic.name)], nic.relays));
        text.family(
            "nic_last_pause_seconds",
            "gauge",
            "For how long no worker drove the NIC when it last changed hands.",
        );
        for (nic, pause) in nics.iter().filter_map(|nic| Some((&nic.name, nic.pause_ns?))) {
            text.sample("nic_last_pause_seconds", &[("nic", nic)], seconds(pause, 9));
        }
    }

    fn vnis(&self, text: &mut Text) {
        let talks = || self.vnis.iter().flat_map(|(vni, talks)| talks.iter().map(move |talk| (vni, talk)));
        let families: [Family<TalkView>; 3] = [
            ("vni_sent_frames_total", "Frames that the node sent to its peer.", |it| it.sent),
            ("vni_received_frames_total", "Frames that the node received from its peer.", |it| it.received),
            (
                "vni_taken_back_total",
                "How often the node took all frames back from a peer that had read none for a second.",
                |it| it.taken_back,
            ),
        ];
        for (name, help, count) in families {
            text.family(name, "counter", help);
            for (vni, talk) in talks() {
                text.sample(name, &[("vni", vni), ("node", &talk.node), ("peer", &talk.other)], count(talk));
            }
        }
        let name = "vni_dropped_frames_total";
        text.family(name, "counter", "Frames between the node and its peer that did not cross.");
        for (vni, talk) in talks() {
            let TalkView { ring_full, over_quota, pool_full, forged, .. } = talk;
            let reasons =
                [("ring_full", ring_full), ("over_quota", over_quota), ("pool_full", pool_full), ("forged", forged)];
            for (reason, count) in reasons {
                let labels: Labels<'_> =
                    &[("vni", vni), ("node", &talk.node), ("peer", &talk.other), ("reason", &reason)];
                text.sample(name, labels, count);
            }
        }
    }
}

/// Returns a number of 10^-`digits` seconds in seconds.
fn seconds(count: u64, digits: u32) -> String {
    let whole = 10_u64.pow(digits);
    format!("{}.{:0width$}", count / whole, count % whole, width = digits as usize)
}

/// Returns the present counts as text.
async fn present(door: &Door) -> Option<String> {
    let (answer, answered) = oneshot::channel();
    // Nothing is counted for a caller that has hung up by then.
    let caller = Arc::new(());
    door.put_for(&caller, Request::Metrics(answer));
    let counts = answered.await.ok()?.ok()?;
    drop(caller);
    Some(counts.text())
}

fn response(text: Option<Bytes>) -> Response {
    match text {
        Some(text) => ([("content-type", "text/plain; version=0.0.4")], text).into_response(),
        None => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}

/// Answers with counts that are no older than `most`, or than is said at [`Shared`].
pub async fn answer(door: &Door, shared: &Shared, most: Duration) -> Response {
    response(shared.counts(door, most).await)
}

/// Text that callers share. What its making costs grows with the square of the nodes, and each user that may read may ask.
#[derive(Debug, Default)]
pub struct Shared(Mutex<Option<Made>>);

#[derive(Debug)]
struct Made {
    at: Instant,
    took: Duration,
    text: Bytes,
}

impl Shared {
    /// Returns the text that was made last, if that is no older than `most`, or than four times as long as it took from asking
    /// the loop to the text. Callers that ask meanwhile wait for the same one.
    async fn counts(&self, door: &Door, most: Duration) -> Option<Bytes> {
        let mut last = self.0.lock().await;
        if let Some(made) = last.as_ref().filter(|made| made.at.elapsed() < most.max(4 * made.took)) {
            return Some(made.text.clone());
        }
        let begun = Instant::now();
        let text = Bytes::from(present(door).await?);
        *last = Some(Made { at: Instant::now(), took: begun.elapsed(), text: text.clone() });
        Some(text)
    }
}

/// Listens for a server of Prometheus.
///
/// # Errors
/// A sentence: the address cannot be listened at.
pub fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listener = TcpListener::bind(address).with_context(|| {
        format!(
            "[daemon], metrics: {address} cannot be listened at; name another address, or end the process that has it"
        )
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves `/metrics`, and nothing else, for anybody who can connect.
pub async fn serve(listener: tokio::net::TcpListener, door: Door) {
    let seats = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let shared = Arc::new(Shared::default());
    let counts = async move || answer(&door, &shared, COUNTS_AGE_MAX).await;
    let only = |status: StatusCode| {
        (status, "this address has the counts alone: GET /metrics; ask tasukid's socket for the rest\n")
    };
    let router = Router::new()
        .route("/metrics", get(counts))
        .fallback(async move || only(StatusCode::NOT_FOUND))
        .method_not_allowed_fallback(async move || only(StatusCode::METHOD_NOT_ALLOWED));
    while let Ok(seat) = seats.clone().acquire_owned().await {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // No descriptor is left, and no event says when there is one.
            Err(_) => {
                tokio::time::sleep(REQUEST_TIMEOUT).await;
                continue;
            }
        };
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            let mut server = http1::Builder::new();
            server.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIMEOUT).keep_alive(false);
            let _ =
                tokio::time::timeout(2 * REQUEST_TIMEOUT, server.serve_connection(TokioIo::new(stream), service)).await;
            drop(seat);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::types::{ClientView, ConfigurationView, VmView};

    #[test]
    fn samples_are_as_prometheus_reads_them() {
        let talk = TalkView {
            node: "red".to_owned(),
            other: "blue".to_owned(),
            sent: 5,
            received: 4,
            ring_full: 1,
            over_quota: 0,
            pool_full: 0,
            taken_back: 0,
            forged: 2,
        };
        let queue = QueueView { queue: "rx0".to_owned(), packets: 7, drops_length: 3, ..QueueView::default() };
        let vm =
            VmView { socket: "/vm.sock".into(), mac: String::new(), mtu: None, pairs: Some(1), queues: vec![queue] };
        let machine = NodeView {
            name: "vm".to_owned(),
            work: String::new(),
            workers: Vec::new(),
            nics: Vec::new(),
            generation: 1,
            trouble: None,
            left_out: None,
            captured: false,
            container: None,
            netns: None,
            unconfined: std::collections::BTreeSet::new(),
            client: Some(ClientView { is: "runs".to_owned(), process: None }),
            vm: Some(vm),
        };
        let status = Status {
            version: "a \"b\\c\"\n".to_owned(),
            pid: 1,
            up_ms: 61_005,
            adopted: 2,
            trouble: None,
            not_replaced: None,
            configuration: ConfigurationView {
                generation: 3,
                drift: vec!["a step".to_owned()],
                ..ConfigurationView::default()
            },
            nodes: vec![machine],
            nics: Vec::new(),
        };
        let worker = serde_json::from_value(serde_json::json!({
            "worker": 4, "pid": 100, "node": "red", "is": "drives", "drives": [], "binary": "", "generation": 0,
            "received": 1, "sent": 1, "missing": 0, "late": 0, "refused": 6, "dropped": { "nobody": 6 }, "unconfined": [],
        }));
        let (workers, vnis) = (vec![worker.unwrap()], vec![("lan".to_owned(), vec![talk])]);
        let text = Metrics { status, workers, vnis, last_event: 9 }.text();
        for line in [
            "tasuki_info{version=\"a \\\"b\\\\c\\\"\\n\"} 1",
            "tasuki_up_seconds 61.005",
            "tasuki_configuration_drift_steps 1",
            "tasuki_node_client{node=\"vm\"} 1",
            "tasuki_vm_queue_packets_total{node=\"vm\",queue=\"rx0\"} 7",
            "tasuki_vm_queue_drops_total{node=\"vm\",queue=\"rx0\",reason=\"length\"} 3",
            "tasuki_worker_refused_frames_total{node=\"red\",worker=\"4\"} 6",
            "tasuki_worker_dropped_frames_total{node=\"red\",worker=\"4\",reason=\"nobody\"} 6",
            "# TYPE tasuki_vni_sent_frames_total counter",
            "tasuki_vni_sent_frames_total{vni=\"lan\",node=\"red\",peer=\"blue\"} 5",
            "tasuki_vni_dropped_frames_total{vni=\"lan\",node=\"red\",peer=\"blue\",reason=\"forged\"} 2",
        ] {
            assert!(text.lines().any(|its| its == line), "{line}\n{text}");
        }
        assert_eq!(seconds(1_500_000_000, 9), "1.500000000");
    }

    #[test]
    fn alarms_and_the_dashboard_ask_for_what_there_is() {
        let status: Status = serde_json::from_value(serde_json::json!({
            "version": "", "pid": 1, "up_ms": 0, "adopted": 0, "nodes": [], "nics": [],
        }))
        .unwrap();
        let text = Metrics { status, workers: Vec::new(), vnis: Vec::new(), last_event: 0 }.text();
        let contrib = [
            include_str!("../../../../contrib/prometheus/tasuki.rules.yml"),
            include_str!("../../../../contrib/grafana/tasuki.json"),
        ];
        let is_part = |c: char| c == '_' || c.is_ascii_lowercase();
        let names = contrib.iter().flat_map(|it| it.split(|c| !is_part(c))).filter(|name| name.starts_with("tasuki_"));
        let names: std::collections::BTreeSet<&str> = names.collect();
        assert!(names.len() > 8, "{names:?}");
        for name in names {
            assert!(text.contains(&format!("# TYPE {name} ")), "there is no {name}");
        }
    }

    /// A rate takes two samples at least, and one may be missed.
    #[test]
    fn alarms_look_back_over_several_samples() {
        let rules = include_str!("../../../../contrib/prometheus/tasuki.rules.yml");
        let page = include_str!("../../../../docs/users/watch-it.md");
        let (_, interval) = page.split_once("scrape_interval: ").unwrap();
        let interval: u32 = interval.split_once('s').unwrap().0.parse().unwrap();
        // The default of Prometheus counts where somebody leaves that line out.
        assert!(interval < 60);
        let ranges: Vec<&str> =
            rules.split('[').skip(1).filter_map(|rest| rest.split_once("m]")).map(|it| it.0).collect();
        assert!(!ranges.is_empty());
        assert!(ranges.iter().all(|minutes| minutes.parse::<u32>().is_ok_and(|minutes| minutes >= 4)), "{ranges:?}");
    }

    #[test]
    fn any_number_of_callers_ask_the_loop_once() {
        let status = || Status {
            version: String::new(),
            pid: 1,
            up_ms: 0,
            adopted: 0,
            trouble: None,
            not_replaced: None,
            configuration: ConfigurationView::default(),
            nodes: Vec::new(),
            nics: Vec::new(),
        };
        let (sender, requests) = std::sync::mpsc::channel();
        let door = Door::new(sender).unwrap();
        let asked = std::thread::spawn(move || {
            let answers = requests.iter().filter_map(|(request, _)| match request {
                Request::Metrics(answer) => Some(answer),
                _ => None,
            });
            let metrics = || Metrics { status: status(), workers: Vec::new(), vnis: Vec::new(), last_event: 0 };
            answers.filter_map(|answer| answer.send(Ok(metrics())).ok()).count()
        });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let shared = Shared::default();
            for _ in 0..9 {
                assert_eq!(answer(&door, &shared, Duration::MAX).await.status(), StatusCode::OK);
            }
            // As if it had been made in no time.
            shared.0.lock().await.as_mut().expect("just made").took = Duration::ZERO;
            assert_eq!(answer(&door, &shared, Duration::ZERO).await.status(), StatusCode::OK);
            // One whose making took long is passed on.
            shared.0.lock().await.as_mut().expect("just made").took = Duration::from_secs(600);
            assert_eq!(answer(&door, &shared, Duration::ZERO).await.status(), StatusCode::OK);
        });
        drop(door);
        assert_eq!(asked.join().unwrap(), 2, "they are asked for when they are too old");
    }
}
