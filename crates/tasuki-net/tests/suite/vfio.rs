//! VFIO on the machine that runs the test.

use tasuki_net::nic::bus::Vfio;
use tasuki_net::nic::bus::vfio::{Address, OpenError};

#[test]
fn a_device_that_is_not_there_is_said_to_be_missing() {
    let nowhere = "ffff:ff:1f.7".parse::<Address>().unwrap();
    match Vfio::open(nowhere) {
        Err(OpenError::NoDevice(address)) => assert_eq!(address, nowhere),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_device_behind_no_iommu_is_said_to_be() {
    let devices = std::fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let mut behind_none = devices.filter(|device| !device.path().join("iommu_group").exists());
    let Some(device) = behind_none.next() else {
        println!("skipped: needs a PCI device that is behind no IOMMU");
        return;
    };
    let address = device.file_name().to_string_lossy().parse::<Address>().unwrap();
    match Vfio::open(address) {
        Err(OpenError::NoIommu(its)) => assert_eq!(its, address),
        other => panic!("{other:?}"),
    }
}
