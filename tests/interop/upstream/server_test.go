// Package tests is upstream's integration suite, whose files upstream-suite adds
// to this folder, with a runner for a server in a process of its own. Upstream
// has such a runner only for agents.
package tests

import (
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/spf13/pflag"
	// Only upstream's files use this module; the import keeps it in go.mod.
	_ "go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/apiserver-network-proxy/cmd/server/app/options"
	metricstest "sigs.k8s.io/apiserver-network-proxy/pkg/testing/metrics"
	"sigs.k8s.io/apiserver-network-proxy/tests/framework"
)

// stopLimit is the longest time between SIGTERM and the end of the server.
const stopLimit = 30 * time.Second

var serverPath = flag.String("server-path", "", "Path to the server binary to test against, or empty to run the in-process server.")

func init() {
	Framework.ProxyServerRunner = serverRunner{inProcess: Framework.ProxyServerRunner}
	// Upstream's tests take idle connections to an endpoint of metrics for leaks.
	http.DefaultTransport.(*http.Transport).DisableKeepAlives = true
}

// serverRunner starts the binary of -server-path. Flags are parsed after init,
// so the choice between the two runners belongs to Start.
type serverRunner struct{ inProcess framework.ProxyServerRunner }

func (r serverRunner) Start(t testing.TB, opts framework.ProxyServerOpts) (framework.ProxyServer, error) {
	if *serverPath == "" {
		return r.inProcess.Start(t, opts)
	}
	o, err := serverOptions(opts)
	if err != nil {
		return nil, err
	}
	var args []string
	o.Flags().VisitAll(func(f *pflag.Flag) {
		// The text of an empty list is "[]", which is an element on input.
		if f.Value.String() != "[]" {
			args = append(args, fmt.Sprintf("--%s=%s", f.Name, f.Value.String()))
		}
	})
	s := &externalServer{
		t:      t,
		cmd:    exec.Command(*serverPath, args...),
		health: "http://" + net.JoinHostPort(o.HealthBindAddress, strconv.Itoa(o.HealthPort)),
		agent:  net.JoinHostPort(o.AgentBindAddress, strconv.Itoa(o.AgentPort)),
		front:  o.UdsName,
		exited: make(chan struct{}),
	}
	s.cmd.Stdout, s.cmd.Stderr = os.Stdout, os.Stderr
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.exited)
	}()
	t.Cleanup(s.Stop)
	return s, s.waitForHealth()
}

// serverOptions returns the same options as upstream's in-process runner.
func serverOptions(opts framework.ProxyServerOpts) (*options.ProxyRunOptions, error) {
	ports, err := framework.FreePorts(3)
	if err != nil {
		return nil, err
	}
	o := options.NewProxyRunOptions()
	o.ServerCount, o.Mode = opts.ServerCount, opts.Mode
	o.UdsName, o.ServerPort = filepath.Join(framework.CertsDir, "server-"+uuid.NewString()+".sock"), 0
	o.ClusterCert = filepath.Join(framework.CertsDir, framework.TestServerCertFile)
	o.ClusterKey = filepath.Join(framework.CertsDir, framework.TestServerKeyFile)
	o.ClusterCaCert = filepath.Join(framework.CertsDir, framework.TestCAFile)
	o.AgentBindAddress, o.HealthBindAddress, o.AdminBindAddress = "127.0.0.1", "127.0.0.1", "127.0.0.1"
	o.AgentPort, o.HealthPort, o.AdminPort = ports[0], ports[1], ports[2]
	if opts.AgentPort != 0 {
		o.AgentPort = opts.AgentPort
	}
	return o, nil
}

// externalServer is a server in a process of its own.
type externalServer struct {
	t                    testing.TB
	cmd                  *exec.Cmd
	health, agent, front string
	stop                 sync.Once
	exited               chan struct{}
}

func (s *externalServer) AgentAddr() string { return s.agent }
func (s *externalServer) FrontAddr() string { return s.front }
func (s *externalServer) Ready() bool       { return s.answers("/readyz") }

func (s *externalServer) Metrics() metricstest.ServerTester {
	return &metricstest.Tester{Endpoint: s.health + "/metrics"}
}

// Stop ends the server as an operator does. A server that stays is a failure.
func (s *externalServer) Stop() {
	s.stop.Do(func() {
		_ = s.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-s.exited:
		case <-time.After(stopLimit):
			s.t.Errorf("the server still runs %v after SIGTERM", stopLimit)
			_ = s.cmd.Process.Kill()
			<-s.exited
		}
	})
}

// ConnectedBackends sums the agents over all strategies, as the in-process runner.
func (s *externalServer) ConnectedBackends() (int, error) {
	res, err := http.Get(s.health + "/metrics")
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(res.Body)
	if err != nil {
		return 0, err
	}
	const name = "konnectivity_network_proxy_server_ready_backends"
	family := families[name]
	if family.GetType() != dto.MetricType_GAUGE || len(family.GetMetric()) == 0 {
		return 0, fmt.Errorf("no gauge %s", name)
	}
	sum := 0.0
	for _, m := range family.GetMetric() {
		sum += m.GetGauge().GetValue()
	}
	return int(sum), nil
}

func (s *externalServer) waitForHealth() error {
	return wait.PollImmediate(100*time.Millisecond, framework.ForeverTestTimeout, func() (bool, error) {
		select {
		case <-s.exited:
			return false, fmt.Errorf("the server ended at its start: %v", s.cmd.ProcessState)
		default:
			return s.answers("/healthz"), nil
		}
	})
}

func (s *externalServer) answers(path string) bool {
	res, err := http.Get(s.health + path)
	if err != nil {
		return false
	}
	res.Body.Close()
	return res.StatusCode == http.StatusOK
}
