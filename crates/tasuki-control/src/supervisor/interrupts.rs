//! Routes the interrupts of real cards to the CPU of the node that has the card, wherever the card goes. The kernel
//! hands them to an eventfd; on another CPU that would take time from another node, and wake the worker from afar.

use std::fs;
use std::io;
use std::path::Path;

use super::{About, Supervisor};
use crate::config::Device;

impl Supervisor {
    /// Routes the interrupts of each card whose owner or whose owner's CPUs have changed. A node without a CPU of its
    /// own gets them on the CPUs that no node has.
    pub(super) fn reconcile_interrupts(&mut self) {
        let all = if self.housekeeping_cpus.is_empty() { &self.own_cpus } else { &self.housekeeping_cpus };
        let mut news = Vec::new();
        for card in self.cards.values_mut() {
            let Device::Vfio(address) = &card.config.device else { continue };
            let epoch = card.lease_page.tenure().epoch;
            let Some(node) = card.holder().and_then(|holder| self.workers.get(&holder)).map(|it| &it.record.node)
            else {
                continue;
            };
            let own = self.config.node(node).and_then(|node| node.cpu);
            let cpus = own.as_ref().map_or(&all[..], std::slice::from_ref);
            // A driver that starts a card anew can have others than the last one.
            if card.routed.as_ref().is_some_and(|(at, to)| (*at, &to[..]) == (epoch, cpus)) {
                continue;
            }
            let trouble = route(Path::new("/"), address, cpus).err().map(|why| {
                let name = &card.config.name;
                let to = list(cpus);
                format!(
                    "the interrupts of {name} do not follow it to CPU {to} ({why}); its frames wake node {node} from another CPU"
                )
            });
            // A daemon that may not route any would say so at each relay.
            if let Some(sentence) = trouble.filter(|_| card.routed.as_ref().is_none_or(|(_, to)| to != cpus)) {
                news.push((card.config.name.clone(), sentence));
            }
            card.routed = Some((epoch, cpus.to_vec()));
        }
        news.into_iter().for_each(|(name, sentence)| self.note(About::nic(&name), sentence));
    }
}

/// Has the interrupts of the card at this PCI address come to these CPUs.
///
/// Source: Linux, Documentation/ABI/testing/sysfs-bus-pci (`msi_irqs`), Documentation/core-api/irq/irq-affinity.rst.
fn route(root: &Path, address: &str, cpus: &[u32]) -> io::Result<()> {
    let of = |path: &Path, error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    let all = root.join("sys/bus/pci/devices").join(address).join("msi_irqs");
    for interrupt in fs::read_dir(&all).map_err(|error| of(&all, error))? {
        let file = root.join("proc/irq").join(interrupt?.file_name()).join("smp_affinity_list");
        fs::write(&file, list(cpus)).map_err(|error| of(&file, error))?;
    }
    Ok(())
}

/// Writes CPUs as the kernel lists them.
fn list(cpus: &[u32]) -> String {
    cpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_interrupt_of_a_card_is_routed_and_a_refusal_names_its_file() {
        let root = tempfile::tempdir().expect("a folder");
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("sys/bus/pci/devices/0000:03:00.0/msi_irqs")).expect("a folder");
        for number in ["30", "31"] {
            fs::write(at("sys/bus/pci/devices/0000:03:00.0/msi_irqs").join(number), "msix").expect("a file");
            fs::create_dir_all(at("proc/irq").join(number)).expect("a folder");
        }
        route(root.path(), "0000:03:00.0", &[1, 3]).expect("they are there");
        for number in ["30", "31"] {
            let said =
                fs::read_to_string(at("proc/irq").join(number).join("smp_affinity_list")).expect("it was written");
            assert_eq!(said, "1,3");
        }
        fs::remove_dir_all(at("proc/irq/31")).expect("it was there");
        let refused = route(root.path(), "0000:03:00.0", &[2]).expect_err("one is gone").to_string();
        assert!(refused.contains("proc/irq/31/smp_affinity_list: "), "{refused}");
    }
}
